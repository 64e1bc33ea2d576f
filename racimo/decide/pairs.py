"""Two workers of a run that do not reach each other, though both their nodes answer: one of them has to go."""

from racimo.decide import exits
from racimo.decide.drain import SETTLED_S
from racimo.decide.fit import PAIR_FRESH_S
from racimo.state.events import WorkersLeaving
from racimo.state.fold import State
from racimo.state.nouns import Reason, Run, Worker


def part(state: State, run: Run, now_s: float) -> list[WorkersLeaving]:
    """Lets the workers on one of two such nodes go: never both, and never all who know the run's state.

    It is the node that more others do not reach; among equals the one with fewer workers of the run, then the one with
    the newest.
    """
    if not run.unreachable or not run.elastic or run.generation is None or run.status not in ("running", "pausing"):
        return []
    pair = next((pair for pair in run.unreachable if all(_stays(run, index) for index in pair)), None)
    if pair is None:
        return []
    nodes = tuple(run.workers[index].node for index in pair)
    losing = max(nodes, key=lambda node: _blame(state, run, node, now_s))
    other = nodes[0] if losing == nodes[1] else nodes[1]
    between = [found for found in run.unreachable if {_node_of(run, index) for index in found} == set(nodes)]
    involved = {index for found in between for index in found}
    going = [w for w in run.live_workers if w.index in involved and w.node == losing and not w.leaving]
    text = f"{losing} and {other} both answer but do not reach each other: {_words(going)} on {losing} is let go"
    reason = Reason(code="pair-unreachable", text=text, counts={"workers": len(going)})
    groups = (
        ("release", [w for w in going if w.status == "ready"]),
        ("abort", [w for w in going if w.status != "ready"]),
    )
    return [
        WorkersLeaving(
            run=run.id,
            attempt=run.attempt,
            indices=tuple(worker.index for worker in group),
            how="release" if how == "release" else "abort",
            reason=reason,
        )
        for how, group in groups
        if group
    ]


def _stays(run: Run, index: int) -> bool:
    worker = run.workers.get(index)
    return worker is not None and worker.live and not worker.leaving


def _blame(state: State, run: Run, node: str, now_s: float) -> tuple[bool, int, int, int]:
    """The larger, the rather it is this node whose workers go."""
    here = [worker for worker in run.live_workers if worker.node == node and not worker.leaving]
    elsewhere = any(
        worker.node != node and not worker.leaving and exits.holds_state(run, worker, now_s, SETTLED_S)
        for worker in run.live_workers
    )
    fresh = sum(node in pair and now_s < at_s + PAIR_FRESH_S for pair, at_s in state.unreachable.items())
    return elsewhere, fresh, -len(here), max((worker.index for worker in here), default=0)


def _node_of(run: Run, index: int) -> str:
    worker = run.workers.get(index)
    return "" if worker is None else worker.node


def _words(workers: list[Worker]) -> str:
    return ", ".join(f"worker {worker.index}" for worker in workers)
