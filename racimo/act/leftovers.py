"""Ends what a cluster's agent left behind when it could not do so itself: the last step of a shutdown.

Only what this cluster recorded (by pid and start time), what shares a process group or session with such a worker, and
what has become this process's own child is ended; nothing is looked up by name.
"""

import glob
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from racimo.act import guardian

MOST_WAIT_S = 5.0
WAIT_STEP_S = 0.01


def end_all(root: str) -> int:
    """SIGKILL to every recorded zygote and worker, their groups and sessions, and this process's remaining children.
    Returns how many processes were killed, after they are gone (at most `MOST_WAIT_S`)."""
    return _kill_while_there_are(lambda: find_all(root))


def end_trees(tops: Sequence[int]) -> int:
    """SIGKILL to these processes of ours, all below them, and this process's children: where there are no records any
    more. Returns how many were killed, after they are gone (at most `MOST_WAIT_S`)."""
    known = {pid: guardian.start_ticks(pid) for pid in tops}

    def find() -> set[int]:
        # Children of killed ones come to this process, and are found in the next round.
        alive = {pid for pid, ticks in known.items() if ticks is not None and guardian.start_ticks(pid) == ticks}
        for pid in _tree(alive):
            known.setdefault(pid, guardian.start_ticks(pid))
        return {pid for pid, ticks in known.items() if ticks is not None and guardian.start_ticks(pid) == ticks}

    return _kill_while_there_are(find)


def _kill_while_there_are(find: Callable[[], set[int]]) -> int:
    killed: set[int] = set()
    until_s = time.monotonic() + MOST_WAIT_S
    while True:
        targets = find()
        for pid in targets:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.add(pid)
        reap_all()
        if not targets or time.monotonic() > until_s:
            return len(killed)
        time.sleep(WAIT_STEP_S)  # many processes of no common parent: no one event to wait for


def find_all(root: str) -> set[int]:
    """Pids of living processes that belong to the cluster, services excepted."""
    leaders: dict[int, int] = {}
    for path in (
        *glob.glob(os.path.join(root, "node", "workers", "*", "*", "*", "pid.json")),
        *glob.glob(os.path.join(root, guardian.PROCESSES_DIR, "*.json")),
    ):
        if os.path.basename(path) in ("supervisor.json", "control.json", "agent.json"):
            continue
        try:
            with open(path) as file:
                content = json.load(file)
            leaders[int(content["pid"])] = int(content["start_ticks"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            continue  # cut off while it was written: such a process is found through its group or parent, or not ours
    found = {pid for pid, ticks in leaders.items() if guardian.start_ticks(pid) == ticks}
    own = os.getpid()
    for process in _all_processes():
        of_leader = [leaders[leader] for leader in (process.group, process.session) if leader in leaders]
        # A group outlives its leader, and the number is not given out again while it does; ticks tell an older owner.
        is_of_group = of_leader and process.ticks >= min(of_leader)
        if process.parent == own or (is_of_group and group_is_ours(leaders, process.group, process.session)):
            found.add(process.pid)
    return found


class _Process(NamedTuple):
    pid: int
    parent: int
    group: int
    session: int
    ticks: int


def _all_processes() -> Iterator[_Process]:
    """Every living process of this machine but this one."""
    own = os.getpid()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == own:
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                text = stat.read()
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = text[text.rindex(b")") + 2 :].split()
        if fields[0] not in (b"Z", b"X"):
            parent, group, session, ticks = (int(fields[position]) for position in (1, 2, 3, 19))
            yield _Process(int(name), parent, group, session, ticks)


def _tree(tops: Iterable[int]) -> set[int]:
    """These processes, this one's children, and all below them."""
    children: dict[int, list[int]] = {}
    for process in _all_processes():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    waiting = [*tops, *children.get(os.getpid(), [])]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def group_is_ours(leaders: dict[int, int], group: int, session: int) -> bool:
    """Whether the recorded leader of that group or session is alive, or gone without another in its place."""
    return any(
        leader in leaders and guardian.start_ticks(leader) in (None, leaders[leader]) for leader in (group, session)
    )


def reap_all() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
