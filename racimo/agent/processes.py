"""Processes of this machine by pid *and* start time, so that a reused pid is never taken for the one that was meant."""

import ctypes
import errno
import functools
import os
import signal
from pathlib import Path

import msgspec

from racimo.agent.whole_file import write_whole

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MAX_KILL_ROUNDS = 1_000

_libc = ctypes.CDLL(None, use_errno=True)


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One process, for good: the pid, its start in clock ticks since boot, and which boot. `monotonic_s` is when the
    record was made, on CLOCK_MONOTONIC."""

    pid: int
    start_ticks: int
    boot: str = ""
    monotonic_s: float = 0.0
    role: str = ""


@functools.cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of `/proc/PID/stat` from the third (state) on; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(b")") + 2 :].decode().split()


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it is gone or only waits to be reaped."""
    fields = _stat_fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def is_alive(record: ProcessRecord) -> bool:
    """Whether that very process still runs (a zombie does not)."""
    if record.pid <= 0 or (record.boot and record.boot != boot_id()):
        return False
    return start_ticks(record.pid) == record.start_ticks


def record_of(pid: int, role: str, monotonic_s: float) -> ProcessRecord | None:
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    return ProcessRecord(pid=pid, start_ticks=ticks, boot=boot_id(), monotonic_s=monotonic_s, role=role)


def open_pidfd(record: ProcessRecord) -> int | None:
    """A pidfd of that very process (readable once it has ended), or None if it is gone."""
    try:
        pidfd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return None
    if is_alive(record):
        return pidfd
    os.close(pidfd)
    return None


def write_process_file(path: Path, role: str, monotonic_s: float) -> None:
    """Says who this process is (`processes/ROLE.json`), atomically."""
    record = record_of(os.getpid(), role, monotonic_s)
    assert record is not None
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(path, msgspec.json.encode(record))


def read_process_file(path: Path) -> ProcessRecord | None:
    """The record in a pid file; None if there is none or it is torn."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProcessRecord)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def set_child_subreaper() -> None:
    """Orphans below this process become its children, so it can end and reap them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(number: int) -> None:
    """The kernel sends this signal when the parent dies; survives exec."""
    _prctl(PR_SET_PDEATHSIG, number)


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def signal_group(group: int, number: int) -> bool:
    """Sends a signal to a process group; False if it has no process any more."""
    assert group > 1, group
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        # Every member that is left belongs to another user (setuid): nothing that we could end.
        return False
    return True


def children_of(pid: int) -> list[int]:
    """Direct children of all threads of a process, zombies included."""
    children: list[int] = []
    try:
        threads = [path.name for path in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return children
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                children.extend(int(word) for word in file.read().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return children


def kill_children_except(kept: frozenset[int] | set[int]) -> int:
    """SIGKILLs and reaps every child of this process but those in `kept`, and what they leave to us as a subreaper.

    Returns how many were ended. For a process that set itself child subreaper.
    """
    ended = 0
    for _ in range(MAX_KILL_ROUNDS):
        strays = [pid for pid in children_of(os.getpid()) if pid not in kept]
        if not strays:
            break
        for pid in strays:
            kill_quietly(pid, signal.SIGKILL)
            try:
                os.waitpid(pid, 0)
                ended += 1
            except ChildProcessError:
                continue
    return ended


def kill_quietly(pid: int, number: int) -> None:
    """Signals one process that may be gone already."""
    try:
        os.kill(pid, number)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EPERM):
            raise


def _all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def pids_marked(variable: bytes, value: bytes) -> list[int]:
    """Processes whose environment at their start held `variable=value`: finds what left a worker's session."""
    wanted = variable + b"=" + value
    found = []
    for pid in _all_pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if pid != os.getpid() and wanted in file.read().split(b"\0"):
                    found.append(pid)
        except OSError:
            continue  # gone meanwhile, or another user's
    return found


def pids_of_session(session: int) -> list[int]:
    """Live processes whose session id is `session`."""
    found = []
    for pid in _all_pids():
        fields = _stat_fields(pid)
        if fields is not None and fields[0] not in "ZX" and int(fields[3]) == session:
            found.append(pid)
    return found


def private_bytes(pid: int) -> int | None:
    """Memory that only this process holds (what its end would free); None if it is gone."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            lines = file.read().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith((b"Private_Clean", b"Private_Dirty")))


def resident_bytes(pid: int) -> int:
    fields = _stat_fields(pid)
    return 0 if fields is None else int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> float:
    """Processor time used so far, user and system, in seconds."""
    fields = _stat_fields(pid)
    return 0.0 if fields is None else (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes() -> tuple[int, int]:
    """(available, total) memory of this machine."""
    values = {}
    with open("/proc/meminfo", "rb") as file:
        for line in file:
            name, _, rest = line.partition(b":")
            if name in (b"MemAvailable", b"MemTotal"):
                values[name] = int(rest.split()[0]) * 1024
    return values[b"MemAvailable"], values[b"MemTotal"]


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since boot."""
    with open("/proc/vmstat", "rb") as file:
        for line in file:
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return 0
