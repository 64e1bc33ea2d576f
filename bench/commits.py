"""Reads what workers committed. Every system under test appends one JSON line per applied step: `{"step", "t", ...}`.

`t` is CLOCK_MONOTONIC, one clock for all processes of a machine. Racimo's workers write `steps.jsonl` themselves, the
peers' jobs do it in the same place of the loop: right after `optimizer.step()`.
"""

import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

POLL_S = 0.02


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    t: float
    shards: tuple[int, ...] = ()
    loss: float | None = None
    generation: int = 0
    pid: int = 0
    worker: str = ""
    contributions: dict[str, tuple[int, ...]] = {}
    """Which worker gave which micro-shards to the step, as this one saw it."""


def read_commits(files: Iterable[Path]) -> list[Commit]:
    """All whole lines of all files in order of time; a last line that a killed worker left torn is left out."""
    found = []
    for path in files:
        for line in path.read_bytes().split(b"\n")[:-1]:
            commit = msgspec.json.decode(line, type=Commit)
            found.append(msgspec.structs.replace(commit, worker=commit.worker or str(path.parent)))
    return sorted(found, key=lambda commit: commit.t)


def first_commits(commits: Iterable[Commit]) -> dict[int, float]:
    """When each step was first committed by anyone; steps done again after a restart keep their first time."""
    times: dict[int, float] = {}
    for commit in commits:
        times[commit.step] = min(commit.t, times.get(commit.step, commit.t))
    return times


def step_times_s(commits: Iterable[Commit], skip: int = 3) -> list[float]:
    """Seconds between neighbouring steps, without the first `skip` (warm-up)."""
    times = [at for _, at in sorted(first_commits(commits).items())][skip:]
    return [after - before for before, after in itertools.pairwise(times)]


def new_step_after_s(commits: Iterable[Commit], moment_s: float) -> float | None:
    """Seconds from `moment_s` to the first commit of a step that nobody had committed before; None if none came."""
    later = [at for at in first_commits(commits).values() if at > moment_s]
    return min(later) - moment_s if later else None


def redone_steps(commits: Iterable[Commit], workers: int) -> int:
    """Steps that were applied by more processes than there are at a time: work thrown away and done again."""
    appliers: dict[int, set[tuple[str, int]]] = {}
    for commit in commits:
        appliers.setdefault(commit.step, set()).add((commit.worker, commit.pid))
    return sum(len(who) > workers for who in appliers.values())


def wait_for(done: Callable[[], bool], limit_s: float, what: str) -> None:
    """Looks every 20 ms (files of other systems cannot be awaited); raises TimeoutError that says what did not come."""
    end_s = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} did not come within {limit_s:.0f} s")
        time.sleep(POLL_S)
