"""Adding machines over ssh: Racimo is brought along where it is missing, then each joins as if typed there."""

import shlex
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from racimo.client.binding import shared_token
from racimo.client.discovery import supervisor_alive
from racimo.client.parcel import Parcel, make_parcel
from racimo.client.ssh import CommandFailed, Ssh
from racimo.control.views import ErrorView
from racimo.spec.config import Token, read_config
from racimo.spec.errors import ERROR_KINDS, RacimoError
from racimo.spec.home import Home
from racimo.state.nouns import Node

MAX_HOSTS_AT_ONCE = 16
PROBE_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 300.0
INSTALL_TIMEOUT_S = 3600.0
"""torch is some hundred MB, and gigabytes where it comes with CUDA."""
JOIN_TIMEOUT_S = 120.0
PARCEL_MARK = "racimo.parcel"
"""In the virtual environment there: which parcel is installed."""

Progress = Callable[[str, str], None]
"""Gets a host and what is done with it now."""

_PROBE = """
for python in "$HOME/.racimo/venv/bin/python" python{minor} python3 "$HOME"/.pyenv/versions/{minor}.*/bin/python \\
    "$HOME"/.local/share/uv/python/cpython-{minor}*/bin/python{minor}; do
  found=$(command -v "$python" 2>/dev/null) || continue
  version=$("$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  echo "seen $version $found"
  if [ "$version" = "{minor}" ]; then echo "python $found"; break; fi
done
if [ -f "$HOME/.racimo/venv/{mark}" ]; then echo "parcel $(cat "$HOME/.racimo/venv/{mark}")"; fi
if [ -f "$HOME/.racimo/join.json" ]; then echo "node yes"; fi
"""
_INSTALL = """
set -e
cd "$HOME/.racimo"
rm -f venv/{mark}
venv/bin/python -m pip --version >/dev/null 2>&1 || {python} -m venv --clear venv >&2
venv/bin/python -m pip install --quiet --disable-pip-version-check ./{wheel} {pins}
rm -f {wheel}
echo {id} > venv/{mark}
"""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What each host is told when it joins."""

    slots: int | None = None
    price: float = 0.0
    service: bool = False
    ssh_config: Path | None = None


class Added(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one host: a node, or an error."""

    host: str
    node: Node | None = None
    error: ErrorView | None = None
    note: str = ""


class _Found(msgspec.Struct, frozen=True):
    """What is on a host: a Python of this one's minor version; the id of the parcel in its virtual environment or "";
    whether it is a node of some cluster, whose running code is not to be replaced."""

    python: str
    parcel: str
    is_node: bool


class _Joined(msgspec.Struct):
    node: Node


def add(home: Home, hosts: Sequence[str], wish: Wish, progress: Progress) -> list[Added]:
    """Adds all of these hosts, several at a time; each by itself succeeds or does not. `RacimoError` where none could:
    no cluster here that others can reach, or a host that is no name."""
    head = read_config(home).bind
    if not supervisor_alive(home) or home.join_file.exists() or not head:
        raise RacimoError(
            "wrong-state",
            f"no cluster that others can reach is running in {home.root}",
            "racimo up --bind IP   # an address of this machine that the hosts can reach",
        )
    token, parcel = shared_token(home), make_parcel()
    remotes = [Ssh(host, wish.ssh_config) for host in dict.fromkeys(hosts)]

    def one(remote: Ssh) -> Added:
        try:
            added = _add(remote, head, token, parcel, wish, progress)
        except RacimoError as error:
            view = ErrorView(code=error.code, message=error.message, hint=error.hint)
            added = Added(host=remote.target, error=view)
        words = added.note or (f"node {added.node.id}" if added.node else f"failed [{added.error.code}]")  # type: ignore[union-attr]
        progress(remote.target, words)
        return added

    with ThreadPoolExecutor(min(len(remotes), MAX_HOSTS_AT_ONCE)) as pool:
        return list(pool.map(one, remotes))


def _add(remote: Ssh, head: str, token: Token, parcel: Parcel, wish: Wish, progress: Progress) -> Added:
    progress(remote.target, "connecting")
    found = _probe(remote)
    if found.parcel != parcel.id and not (found.parcel and found.is_node):
        progress(remote.target, f"sending racimo ({len(parcel.content) // 1000} kB)")
        place = f".racimo/{parcel.file_name}"
        command = f"umask 077; mkdir -p .racimo && cat > {shlex.quote(place)}"
        remote.run(
            f"/bin/sh -c {shlex.quote(command)}", "sending racimo", stdin=parcel.content, timeout_s=SEND_TIMEOUT_S
        )
        progress(remote.target, "installing racimo and what it requires")
        script = _INSTALL.format(
            mark=PARCEL_MARK, python=shlex.quote(found.python), wheel=shlex.quote(parcel.file_name), id=parcel.id,
            pins=shlex.join(parcel.pins),
        )  # fmt: skip
        _install(remote, script)
    progress(remote.target, "joining")
    return _join(remote, head, token, wish)


def _install(remote: Ssh, script: str) -> None:
    try:
        remote.script(script, "installing racimo", timeout_s=INSTALL_TIMEOUT_S)
    except CommandFailed as failed:
        if "ensurepip is not available" not in failed.errors:
            raise
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        raise RacimoError(
            "ssh-failed", f"{remote.target}: its Python cannot make virtual environments", f"apt-get install {package}"
        ) from None


def _probe(remote: Ssh) -> _Found:
    """`RacimoError` version-mismatch where there is no fitting Python."""
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    script = _PROBE.format(minor=minor, mark=PARCEL_MARK)
    answer = remote.script(script, "looking for Python", timeout_s=PROBE_TIMEOUT_S)
    answers = [line.split(" ", 1) for line in answer.splitlines()]
    found = {words[0]: words[1] for words in answers if len(words) == 2}
    if "python" not in found:
        seen = ", ".join(words[1] for words in answers if words[0] == "seen") or "none"
        raise RacimoError(
            "version-mismatch",
            f"{remote.target} has no Python {minor}, which the head has (seen there: {seen})",
            f"apt-get install python{minor} python{minor}-venv   # there, or the like",
        )
    in_venv = found["python"].endswith("/.racimo/venv/bin/python")
    return _Found(found["python"], found.get("parcel", "") if in_venv else "", "node" in found)


def _join(remote: Ssh, head: str, token: Token, wish: Wish) -> Added:
    """The token goes through stdin, where no list of processes shows it."""
    words = ["join", head, "--token-file", "-", "-o", "json", "--price", str(wish.price)]
    words += ["--slots", str(wish.slots)] if wish.slots is not None else []
    words += ["--service"] if wish.service else []
    command = f".racimo/venv/bin/racimo {shlex.join(words)}"
    try:
        answer = remote.run(command, "racimo join", stdin=f"{token}\n".encode(), timeout_s=JOIN_TIMEOUT_S)
    except CommandFailed as failed:
        error = _error_of(failed)
        if error is None:
            raise failed from None
        if error.code == "join-refused" and "this cluster already" in error.message:
            return Added(host=remote.target, note="is a node of this cluster already")
        raise RacimoError(error.code, f"{remote.target}: {error.message}", error.hint) from None
    try:
        return Added(host=remote.target, node=msgspec.json.decode(answer, type=_Joined).node)
    except msgspec.MsgspecError as error:
        raise RacimoError("ssh-failed", f"{remote.target} answers what racimo join does not: {error}") from None


def _error_of(failed: CommandFailed) -> RacimoError | None:
    """What `racimo join -o json` said there, on its last line; None if it did not come to say anything."""
    for line in reversed(failed.errors.splitlines()):
        try:
            view = msgspec.json.decode(line, type=ErrorView)
        except msgspec.MsgspecError:
            continue
        return RacimoError(view.code if view.code in ERROR_KINDS else "ssh-failed", view.message, view.hint)
    return None
