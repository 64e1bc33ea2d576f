"""Hangs: which worker has not changed its phase for too long, where its code stands, and who waits for it.

A hang is never concluded from a slow collective: a worker that waits for others is not the one that hangs
(pytorch#118369, nccl#1324: a hang, and nobody can tell which rank or call). Those others may be on other nodes: then
their agents see who hangs, and here it is only said after twice the time, if nobody was named by then.
"""

import asyncio
import os
import re
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from racimo.agent import processes
from racimo.agent.entry import Entry
from racimo.agent.inotify import FileWatcher
from racimo.agent.phases import read_phase
from racimo.agent.protocol import Announce
from racimo.spec.quantity import format_duration
from racimo.state.nouns import Failure, worker_id

STEPS_BEFORE_HANG = 10
PATIENCE_ELSEWHERE = 2
"""So many times its limit may a worker wait for others on other nodes before it is named itself."""
WAITING_PHASES = frozenset({"exchange", "wait"})
QUIET_PHASES = frozenset({"starting", "done"})
NOTE_COUNTS_AFTER_S = 2.0
DUMP_TIMEOUT_S = 2.0
DUMP_QUIET_S = 0.05
"""A stack dump is complete once nothing was added for this long."""
MAX_STACK_BYTES = 64 * 1024
STACKS_FILE = "stacks.log"
MAIN_STACK_HEAD = "Stack of its main thread (most recent call first):"

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')


def quiet_s(entry: Entry, now_s: float, patience: int = 1) -> float:
    """Seconds beyond `patience` times the worker's limit without a change of phase; negative while it is within."""
    assert entry.progress is not None
    limit_s = max(entry.order.hang_after_s, STEPS_BEFORE_HANG * (entry.progress.step_s or 0.0))
    return now_s - entry.progress_at_s - patience * limit_s


def note_phases(entries: Iterable[Entry], now_s: float) -> None:
    """Looks at what workers noted themselves of their phases (`agent.phases`), about once a second. One that is stuck
    with the interpreter's lock could not tell that its exchange is over; one whose link is slow goes on all the same.
    """
    for entry in entries:
        progress = entry.progress
        noted = read_phase(entry.directory) if entry.live and progress is not None else None
        if progress is None or noted is None or noted[0] <= progress.phase_number:
            continue
        number, phase = noted
        if number != entry.noted_phase:
            entry.noted_phase, entry.progress_at_s = number, now_s
        elif now_s - entry.progress_at_s >= NOTE_COUNTS_AFTER_S:  # it would have been told by now
            entry.progress = msgspec.structs.replace(
                progress, phase_number=number, phase=phase, waits_for=(), unreachable=()
            )


def find_hung(entries: Iterable[Entry], now_s: float) -> list[Entry]:
    """The workers of one run that hang and were not yet reported for their present phase.

    If all of them wait for one another, those that they wait for (their network is stuck, or they are). If they wait
    for workers on other nodes, one of them, and only after `PATIENCE_ELSEWHERE` times their limit.
    """
    entries = list(entries)
    known = [entry for entry in entries if entry.live and entry.progress is not None and not entry.frozen]
    known = [entry for entry in known if not _awaits_the_first_generation(entry)]
    late = [entry for entry in known if quiet_s(entry, now_s) > 0]
    hung = [entry for entry in late if _phase(entry) not in WAITING_PHASES | QUIET_PHASES]
    waiting = [entry for entry in late if _phase(entry) in WAITING_PHASES]
    if not hung and waiting and len(waiting) == len(known):
        awaited = {index for entry in waiting if entry.progress for index in entry.progress.waits_for}
        if awaited <= {entry.index for entry in entries}:
            hung = [entry for entry in waiting if entry.index in awaited] or waiting[:1]
        else:
            hung = [entry for entry in waiting if quiet_s(entry, now_s, PATIENCE_ELSEWHERE) > 0][:1]
    return [entry for entry in hung if entry.progress and entry.hung_phase != entry.progress.phase_number]


def _awaits_the_first_generation(entry: Entry) -> bool:
    """Others are still being started, perhaps on a node that has to build their environment first."""
    progress = entry.progress
    return progress is not None and progress.phase == "wait" and not progress.generation and not progress.waits_for


def _phase(entry: Entry) -> str:
    return entry.progress.phase if entry.progress is not None else ""


def rank_of(entry: Entry, generation: Announce | None) -> int:
    """Its position in the newest generation, else as first planned."""
    rank = _rank_of_name(entry.name, generation)
    return entry.order.rank if rank is None else rank


def _rank_of_name(name: str, generation: Announce | None) -> int | None:
    names = [member.worker for member in generation.members] if generation is not None else []
    return names.index(name) if name in names else None


async def describe_hang(
    entry: Entry, peers: Collection[Entry], generation: Announce | None, files: FileWatcher, cwd: Path
) -> Failure:
    """The `Failure` that names rank, phase, line and who waits; takes a stack dump first."""
    assert entry.progress is not None
    stack = await dump_stack(entry, files)
    place = find_user_line(stack, cwd)
    rank = rank_of(entry, generation)
    waiting = sorted(
        rank_of(peer, generation)
        for peer in peers
        if peer.live and peer.progress is not None and entry.index in peer.progress.waits_for and peer is not entry
    )
    duration = format_duration(time.monotonic() - entry.progress_at_s)
    parts = [f"rank {rank} ({entry.name}) has been in phase {entry.progress.phase!r} for {duration}"]
    parts.append(f"at {place}" if place else "and its process gave no stack (stopped, or stuck in the kernel)")
    if waiting:
        parts.append(f"while {_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for it")
    awaited = _awaited(entry, generation)
    if awaited and _phase(entry) in WAITING_PHASES:
        parts.append(f"waiting for {_ranks(awaited)}")
    return Failure(
        code="worker-hung",
        message=" ".join(parts),
        hint=f"racimo logs {entry.run}; the stack of every thread is in {entry.directory / STACKS_FILE}",
        traceback=main_stack(stack, cwd),
        rank=rank,
        worker=entry.name,
    )


def _awaited(entry: Entry, generation: Announce | None) -> list[int]:
    """The ranks that it waits for, on this node or another."""
    assert entry.progress is not None
    names = [worker_id(entry.run, entry.attempt, index) for index in entry.progress.waits_for]
    ranks = [_rank_of_name(name, generation) for name in names]
    return sorted(rank for rank in ranks if rank is not None)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


async def dump_stack(entry: Entry, files: FileWatcher) -> str:
    """Asks the worker for the stacks of all its threads (faulthandler, SIGUSR2); "" if none comes in time."""
    path = entry.directory / STACKS_FILE
    if entry.record is None or not path.exists():
        return ""
    begin = path.stat().st_size
    with files.watch(entry.directory) as watch:
        if not processes.is_alive(entry.record):
            return ""
        os.kill(entry.record.pid, signal.SIGUSR2)
        deadline_s = time.monotonic() + DUMP_TIMEOUT_S
        while path.stat().st_size == begin and (left_s := deadline_s - time.monotonic()) > 0:
            await watch.pulse.wait(left_s)
        while time.monotonic() < deadline_s and await watch.pulse.wait(DUMP_QUIET_S):
            pass
    return await asyncio.to_thread(_read_from, path, begin)


def _read_from(path: Path, begin: int) -> str:
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read(MAX_STACK_BYTES).decode(errors="replace")


def find_user_line(stack: str, cwd: Path) -> str:
    """`file:line in function` of the innermost frame in the run's own files, the main thread first; or ""."""
    main = _main_thread(stack)
    for block in (main, *(block for block in stack.split("\n\n") if block != main)):
        for match in _FRAME.finditer(block):
            if match["file"].startswith(f"{cwd}/"):
                return f"{match['file'].removeprefix(f'{cwd}/')}:{match['line']} in {match['name']}"
    return ""


def main_stack(stack: str, cwd: Path) -> str:
    """The main thread's frames, from the innermost to the user's outermost (what called that is ours); "" if none."""
    frames = [line for line in _main_thread(stack).splitlines() if _FRAME.search(line)]
    users = [number for number, line in enumerate(frames) if f'File "{cwd}/' in line]
    if users:
        frames = frames[: users[-1] + 1]
    return "".join(f"{line}\n" for line in (MAIN_STACK_HEAD, *frames)).replace(f"{cwd}/", "") if frames else ""


def _main_thread(stack: str) -> str:
    """Its part of a dump: the kernel gives it the signal, so it is `Current`; else the first to have been made, which
    Python lists last."""
    blocks = stack.strip("\n").split("\n\n")
    return next((block for block in blocks if block.startswith("Current thread")), blocks[-1])
