"""The processes of a Ray part: started so that they end with it, found again by pid and start time, and ended whole."""

import asyncio
import json
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from racimo.act import guardian
from racimo.act.ray.place import MARK_VARIABLE
from racimo.agent.processes import set_parent_death_signal

GRACE_S = 4.0
"""For Ray to say goodbye to its cluster; after that SIGKILL."""
LOOK_S = 0.02
MAX_LINE_BYTES = 2**22
"""What one line of a piped process may hold: some words about each of thousands of nodes."""
KILL_MOST_S = 5.0
ENGINE, DRIVER = "ray-engine", "ray-driver"
"""Names of the records of the two that lead a session (`processes/NAME.json`)."""


class Family:
    """What was started for the home `root`, by this process or by one before it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def start(
        self, name: str, command: list[str], environment: dict[str, str], log: IO[bytes], *, piped: bool = False
    ) -> Process:
        """Starts the leader of a session, which dies with this process, and records it. `OSError`."""
        process = await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            cwd=self._root,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if piped else log,
            stderr=log,
            start_new_session=True,
            limit=MAX_LINE_BYTES,
            preexec_fn=_die_with_parent,
        )
        guardian.write_record(self._root, name, process.pid)
        return process

    def members(self) -> set[int]:
        """Pids of all that live: the sessions of the recorded leaders, and what bears our mark (Ray's workers write
        their titles over it)."""
        leaders = dict(self._leaders())
        found = set()
        for pid, _, session, ticks in _processes():
            led = session in leaders and ticks >= leaders[session] and _same_or_gone(session, leaders[session])
            if led or self._bears_mark(pid):
                found.add(pid)
        return found

    async def end(self, grace_s: float) -> int:
        """Ends them all, those of an earlier Ray part of this home included: SIGTERM to the leaders, SIGKILL to what is
        left. Returns how many had to be killed."""
        loop = asyncio.get_running_loop()
        if grace_s:
            leaders = list(self._leaders())
            for pid in _alive(leaders):
                _signal(pid, signal.SIGTERM)
            until_s = loop.time() + grace_s
            while _alive(leaders) and loop.time() < until_s:
                await asyncio.sleep(LOOK_S)  # perhaps not our children: no one event to wait for
        killed: set[int] = set()
        until_s = loop.time() + KILL_MOST_S
        while (members := self.members()) and loop.time() < until_s:
            for pid in members:
                _signal(pid, signal.SIGKILL)
            killed |= members
            await asyncio.sleep(LOOK_S)
        for name in (ENGINE, DRIVER):
            Path(guardian.record_path(self._root, name)).unlink(missing_ok=True)
        return len(killed)

    def _leaders(self) -> Iterator[tuple[int, int]]:
        for name in (ENGINE, DRIVER):
            try:
                content = json.loads(Path(guardian.record_path(self._root, name)).read_bytes())
                yield int(content["pid"]), int(content["start_ticks"])
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                continue  # never started, or cut off while it was written: the mark finds it

    def _bears_mark(self, pid: int) -> bool:
        try:
            content = Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False
        return f"{MARK_VARIABLE}={self._root}".encode() in content.split(b"\0")


def children(pid: int) -> list[tuple[int, str]]:
    """Pid and name (as the kernel has it, 15 characters) of the direct children of a process."""
    found = []
    for child, parent, _, _ in _processes():
        if parent == pid:
            try:
                found.append((child, Path(f"/proc/{child}/comm").read_text().strip()))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def _alive(leaders: list[tuple[int, int]]) -> list[int]:
    return [pid for pid, ticks in leaders if guardian.start_ticks(pid) == ticks]


def _die_with_parent() -> None:
    set_parent_death_signal(signal.SIGKILL)


def _same_or_gone(pid: int, ticks: int) -> bool:
    return guardian.start_ticks(pid) in (None, ticks)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _processes() -> Iterator[tuple[int, int, int, int]]:
    """Pid, parent, session and start ticks of every living process."""
    for name in os.listdir("/proc"):  # noqa: PTH208  (a thousand names, again and again)
        if not name.isdigit():
            continue
        try:
            text = Path(f"/proc/{name}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = text[text.rindex(b")") + 2 :].split()
        if fields[0] not in (b"Z", b"X"):
            yield int(name), int(fields[1]), int(fields[3]), int(fields[19])
