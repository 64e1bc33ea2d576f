"""A hang as the whole run sees it: the stuck worker's agent names it and its line, here come those that wait for it on
all nodes (pytorch#118369, nccl#1324: a hang, and nobody can tell which rank, node or call)."""

import re
from collections.abc import Iterable

import msgspec

from racimo.agent.protocol import Wait
from racimo.state.nouns import Failure, Run, parse_worker_id, worker_id

_BESIDE = re.compile(r" while ranks? [\d, ]+ waits? for it$")
"""What the agent says of those on its own node."""


def name_waiting(failure: Failure, run: Run, waits: Iterable[Wait]) -> Failure:
    """`failure` of a hung worker with the ranks that wait for it; as it is if none are known."""
    ranks = sorted(
        _rank(run, index)
        for wait in waits
        for name, attempt, index in (parse_worker_id(wait.worker),)
        if (name, attempt) == (run.id, run.attempt) and failure.worker in _awaited(run, wait)
        if index in run.workers and wait.worker != failure.worker
    )
    if not ranks:
        return failure
    words = ", ".join(map(str, ranks))
    waiting = f"while rank {words} waits for it" if len(ranks) == 1 else f"while ranks {words} wait for it"
    return msgspec.structs.replace(failure, message=f"{_BESIDE.sub('', failure.message)} {waiting}")


def _awaited(run: Run, wait: Wait) -> set[str]:
    return {worker_id(run.id, run.attempt, index) for index in wait.waits_for}


def _rank(run: Run, index: int) -> int:
    """Its position in the newest generation, else as first planned."""
    members = run.generation.members if run.generation is not None else ()
    return members.index(index) if index in members else run.workers[index].rank
