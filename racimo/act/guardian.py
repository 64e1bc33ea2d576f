"""Knowing one's fellow processes, and starting the supervisor again when it died.

Standard library only and light: the supervisor (small for life), the control process and the agent all import it. A
process is named by pid *and* start time (`/proc/PID/stat` field 22), never by a bare pid, and watched by its pidfd.
"""

from __future__ import annotations

import json
import os
import signal
import sys

TYPE_CHECKING = False  # what type checkers know as typing's; typing and asyncio would double the supervisor's size
if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from typing import NoReturn

SUPERVISED_VARIABLE = "RACIMO_SUPERVISED"
"""Set by the supervisor for what it starts: only those processes watch it in turn."""

SUPERVISOR_HELD = 3
"""Exit code of a supervisor that found another one holding the lock."""

RESTART_DELAY_FIRST_S = 0.05
RESTART_DELAY_MOST_S = 2.0
LOOK_AT_HOME_S = 10.0
"""How long a cluster may outlive its home folder."""

# `spec.home.Home` has these too; it needs msgspec, which would add a third to the supervisor's size. A test compares.
PROCESSES_DIR = "processes"
LOGS_DIR = "logs"
LOCK_FILE = "supervisor.lock"
SHUTDOWN_MARK = "shutdown"
"""In the processes folder: somebody asked for the end of this cluster. Nothing is started again while it is there."""

KEPT_VARIABLES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH",
    "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy",
    "https_proxy", "no_proxy", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR",
})  # fmt: skip
KEPT_PREFIXES = ("LC_", "NVIDIA_", "PIP_", "UV_")


class ProcessRecord:
    """One process as others find it: `processes/NAME.json` holds the same three."""

    __slots__ = ("pid", "role", "start_ticks")

    def __init__(self, pid: int, start_ticks: int, role: str) -> None:
        self.pid = pid
        self.start_ticks = start_ticks
        self.role = role

    @property
    def alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is none or only its zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def holds_lock(fd: int, root: str | os.PathLike[str]) -> bool:
    """Whether the lock file of this home is still the one that `fd` is open on; it is another, or none, if the folder
    was deleted or replaced."""
    own = os.fstat(fd)
    return lock_identity(root, (own.st_dev, own.st_ino)) == (own.st_dev, own.st_ino)


def lock_identity(root: str | os.PathLike[str], if_unseen: tuple[int, int] | None) -> tuple[int, int] | None:
    """Device and inode of a home's lock file, the same for the home's life; None if there is none. `if_unseen`: for
    when that is not to be found out just now, such as on a disk that fails."""
    try:
        found = os.stat(os.path.join(root, LOCK_FILE))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return if_unseen
    return found.st_dev, found.st_ino


def record_path(root: str | os.PathLike[str], role: str) -> str:
    return os.path.join(root, PROCESSES_DIR, f"{role}.json")


def write_record(root: str | os.PathLike[str], role: str, pid: int | None = None) -> ProcessRecord:
    """Says in `processes/ROLE.json` who plays that role (this process if no pid is given), atomically.

    `OSError`, such as that of a full disk, leaves the old record."""
    pid = os.getpid() if pid is None else pid
    record = ProcessRecord(pid, start_ticks(pid) or 0, role)
    path = record_path(root, role)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    draft = f"{path}.{os.getpid()}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(fd, "w") as file:
            json.dump({"pid": record.pid, "start_ticks": record.start_ticks, "role": role}, file)
        os.replace(draft, path)
    except OSError:
        os.unlink(draft)
        raise
    return record


def read_live(root: str | os.PathLike[str], role: str) -> ProcessRecord | None:
    """Who plays that role, if that process lives."""
    try:
        with open(record_path(root, role)) as file:
            content = json.load(file)
        record = ProcessRecord(int(content["pid"]), int(content["start_ticks"]), role)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return record if record.alive else None


def open_pidfd(record: ProcessRecord) -> int | None:
    """A file descriptor that turns readable when the process ends; None if it has ended already."""
    try:
        pidfd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return None
    if record.alive:  # checked after opening: from here on the descriptor cannot mean another process
        return pidfd
    os.close(pidfd)
    return None


def clean_environment() -> dict[str, str]:
    """What services are started with: no rank, thread count or secret of the shell that happened to start them."""
    return {
        name: value for name, value in os.environ.items() if name in KEPT_VARIABLES or name.startswith(KEPT_PREFIXES)
    }


def spawn(program: list[str], environment: dict[str, str], log: str) -> int:
    """Starts `python PROGRAM...` in a session of its own, stdin empty, output appended to `log`; its pid."""
    output_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        sys.executable,
        [sys.executable, *program],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, output_flags, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD],
    )


def start_supervisor(root: str | os.PathLike[str]) -> int:
    """Starts this home's supervisor, detached; its pid. If there is one already, the new one ends by itself with
    `SUPERVISOR_HELD`."""
    root = os.path.abspath(root)
    logs = os.path.join(root, LOGS_DIR)
    os.makedirs(logs, mode=0o700, exist_ok=True)
    log = os.path.join(logs, "supervisor.log")
    return spawn(light_program("racimo.control.supervisor", root), clean_environment(), log)


def light_program(module: str, root: str) -> list[str]:
    """As `python -m MODULE --home ROOT`, less what `site` and `runpy` would keep in memory (a quarter)."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    start = f"import sys; sys.path.insert(0, {package!r}); from {module} import main; sys.exit(main())"
    return ["-I", "-S", "-c", start, "--home", root]


def next_delay_s(previous_s: float, most_s: float = RESTART_DELAY_MOST_S) -> float:
    """Back-off between starts: at once, 0.05 s, 0.1 s ... `most_s`."""
    return min(most_s, previous_s * 2) if previous_s else RESTART_DELAY_FIRST_S


class SupervisorWatch:
    """Waits on the supervisor's pidfd and starts a new one when it ends. Made by `watch`."""

    def __init__(self, root: str, loop: asyncio.AbstractEventLoop, say: Callable[[str], None]) -> None:
        self._root = root
        self._loop = loop
        self._say = say
        self._pidfd: int | None = None
        self._pid = 0
        self._delay_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._lock = lock_identity(root, None)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._forget()

    def attach(self) -> None:
        if self._closed:
            return
        if self._lock is not None and lock_identity(self._root, self._lock) != self._lock:
            self._end_without_home()
        record = read_live(self._root, "supervisor")
        if record is None:
            pid = start_supervisor(self._root)
            self._say(f"the supervisor was gone: started process {pid}")
            self._delay_s = next_delay_s(self._delay_s)
            record = ProcessRecord(pid, start_ticks(pid) or 0, "supervisor")
        else:
            self._delay_s = 0.0
        self._pid = record.pid
        self._pidfd = open_pidfd(record)
        if self._pidfd is None:
            self._ended()
        else:
            self._loop.add_reader(self._pidfd, self._ended)

    def _end_without_home(self) -> NoReturn:
        """The supervisor died, and the home with it: a new one would begin an empty cluster where this one was."""
        from racimo.act import leftovers

        self._say(f"{self._root} is no longer this cluster's folder: ending without it")
        leftovers.end_trees([])
        os._exit(1)

    def _ended(self) -> None:
        self._forget()
        try:
            os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:
            pass  # somebody else's child
        # At once the first time; a supervisor that dies again and again, or another starter's that has the lock but
        # has not said so yet, is given a moment.
        self._timer = self._loop.call_later(self._delay_s, self.attach)

    def _forget(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


def watch(
    root: str | os.PathLike[str],
    loop: asyncio.AbstractEventLoop,
    say: Callable[[str], None] = lambda sentence: None,
) -> SupervisorWatch | None:
    """From now on this process starts the supervisor of the home `root` again whenever it dies.

    None, and nothing is watched, if this process was not started by a supervisor. `say` gets one sentence per restart.
    The supervisors' lock settles it when several processes start one at the same time.
    """
    if os.environ.pop(SUPERVISED_VARIABLE, "") != "1":
        return None
    watcher = SupervisorWatch(os.path.abspath(root), loop, say)
    watcher.attach()
    return watcher


def watch_alone(root: str) -> int:
    """The role `watch` of a machine that joined: nothing but starting the supervisor again. Ends at SIGTERM."""
    import select
    import time

    root = os.path.abspath(root)
    lock = lock_identity(root, None)
    delay_s = 0.0
    while lock_identity(root, lock) == lock:
        record = read_live(root, "supervisor")
        pidfd = None if record is None else open_pidfd(record)
        if pidfd is not None:
            while not select.select([pidfd], [], [], LOOK_AT_HOME_S)[0] and lock_identity(root, lock) == lock:
                pass
            os.close(pidfd)
            delay_s = 0.0
            continue
        time.sleep(delay_s)  # at once the first time, then as `SupervisorWatch` does
        delay_s = next_delay_s(delay_s)
        if os.path.exists(os.path.join(root, PROCESSES_DIR, SHUTDOWN_MARK)):
            return 0
        start_supervisor(root)
        reap()
    return 0


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main() -> int:
    assert sys.argv[1] == "--home"
    return watch_alone(sys.argv[2])
