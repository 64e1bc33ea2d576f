"""Coming back after a reboot: a systemd unit for the supervisor of one home.

`KillMode=process` and `OOMPolicy=continue`, as work outlives the supervisor: a unit whose main process dies, or one of
whose workers is killed for its memory, must not take the others with it.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from racimo.client.say import Say
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

SYSTEMD_RUNS = Path("/run/systemd/system")
"""There while systemd is what runs this machine (sd_booted(3))."""
SYSTEMCTL_TIMEOUT_S = 60.0


def unit_name(home: Home) -> str:
    """`racimo.service` for the usual home, another name for each other one."""
    if home.root == Path.home() / ".racimo":
        return "racimo.service"
    return f"racimo-{hashlib.sha256(os.fsencode(home.root)).hexdigest()[:8]}.service"


def unit_folder() -> Path:
    """Root's units start at boot; another user's with the first log-in, or at boot where `linger` is on."""
    if os.geteuid() == 0:
        return Path("/etc/systemd/system")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"


def unit_text(home: Home, *, of_root: bool) -> str:
    """The unit. It does nothing once the home has ended or left its cluster for good."""
    needs = home.join_file if home.join_file.exists() else home.config_file
    program = [sys.executable, "-P", "-m", "racimo.control.supervisor", "--home", str(home.root), "--service"]
    network = ["Wants=network-online.target", "After=network-online.target"] if of_root else []
    lines = [
        "[Unit]",
        f"Description=Racimo ({_escaped(str(home.root))})",
        *network,
        f"ConditionPathExists={_escaped(str(needs))}",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(_quoted(word) for word in program)}",
        f"Environment={_quoted('PATH=' + os.environ.get('PATH', os.defpath), in_command=False)}",
        f"Environment={_quoted('HOME=' + str(Path.home()), in_command=False)}",
        "Restart=on-failure",
        "RestartSec=1",
        "KillMode=process",
        "TimeoutStopSec=180",
        "OOMPolicy=continue",
        "TasksMax=infinity",
        "",
        "[Install]",
        f"WantedBy={'multi-user.target' if of_root else 'default.target'}",
    ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(word: str, *, in_command: bool = True) -> str:
    """As systemd reads words (systemd.syntax(7), "Quoting"; `$` has a meaning in commands alone)."""
    word = _escaped(word).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + (word.replace("$", "$$") if in_command else word) + '"'


def install(home: Home, say: Say, folder: Path | None = None) -> Path:
    """Writes the unit and, where systemd runs, enables and starts it: beside a supervisor that runs already its own
    waits to take over. Returns the unit's path. `RacimoError` start-failed."""
    of_root = os.geteuid() == 0
    path = (folder or unit_folder()) / unit_name(home)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(unit_text(home, of_root=of_root))
    except OSError as error:
        raise RacimoError("start-failed", f"cannot write {path}: {error.strerror}") from None
    systemctl = ["systemctl", *([] if of_root else ["--user"])]
    enable = " ".join([*systemctl, "enable", "--now", path.name])
    if folder is not None or not SYSTEMD_RUNS.is_dir():
        say(f"wrote {path}; systemd does not run here, so it is not enabled: {enable}")
        return path
    for words in (["daemon-reload"], ["enable", "--now", path.name]):
        _systemctl([*systemctl, *words])
    say(f"{path.name} is enabled: it starts at every boot")
    if not of_root:
        say("so that it starts without anybody logging in: loginctl enable-linger")
    return path


def _systemctl(words: list[str]) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SYSTEMCTL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RacimoError("start-failed", f"{' '.join(words)}: {error}", " ".join(words)) from None
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise RacimoError("start-failed", f"{' '.join(words)}: {last}", " ".join(words))
