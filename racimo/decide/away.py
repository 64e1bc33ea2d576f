"""Nodes that do not answer: when one is given up, and how long what runs there keeps its lease.

Silence alone proves nothing: whoever restarts the head silences everyone. A silent node is given up once a worker
elsewhere is stuck on one of its workers. Exact runs then go on without it at once, since their generations fence what
may still live there; only one that would have to go back to its checkpoint gives the node some time. A run that only
its user understands keeps its lease until the node's agent must have ended it, so that no two attempts of it ever live.
"""

from collections.abc import Collection, Iterator

from racimo.decide import exits
from racimo.spec.quantity import format_duration
from racimo.state.events import Intent, NodeLost, WorkersLost
from racimo.state.fold import State
from racimo.state.nouns import Node, Reason, Run, Worker, parse_worker_id

LEASE_S = 600.0
"""After so long without a word from the control process an agent ends what is not exact, on its own clock."""
LEASE_MARGIN_S = 30.0
"""How much longer the control process waits: for the agent's killing, and for clocks that differ in rate."""
BYSTANDER_PATIENCE_S = 10.0
"""How long an exact run waits for a silent node's workers that hold nothing of it: newcomers, and who is to leave."""

HOLDERS_PATIENCE_S = 60.0
"""How long an exact run waits for a lost node if nobody elsewhere holds its newest step."""
HOLDS_AFTER_S = 5.0
"""How long before its peers fell silent a member must have been ready to count as holding the newest step."""


def give_up(state: State, now_s: float) -> list[Intent]:
    """Nodes that count as lost from now on, and the workers that count as gone with their nodes."""
    intents: list[Intent] = []
    lost: set[str] = set()
    for node_id, witness in sorted(state.stuck.items()):
        if state.nodes[node_id].status == "silent":
            lost.add(node_id)
            text = f"{node_id} does not answer and worker {witness} waits for one on it: given up until it is back"
            intents.append(NodeLost(node=node_id, reason=Reason(code="node-lost", text=text)))
    gone: dict[tuple[str, int], list[Worker]] = {}
    for node_id, node in away(state):
        for run, worker in _workers_on(state, node_id):
            if given_up_at_s(state, run, worker, node, lost) <= now_s:
                gone.setdefault((run.id, run.attempt), []).append(worker)
    for (run_id, attempt), workers in gone.items():
        indices = tuple(sorted(worker.index for worker in workers))
        intents.append(WorkersLost(run=run_id, attempt=attempt, indices=indices, reason=_gone(state, workers, now_s)))
    return intents


def away(state: State) -> Iterator[tuple[str, Node | None]]:
    """Nodes with live workers that do not answer, or (None) that were forgotten."""
    for node_id in state.on_node:
        node = state.nodes.get(node_id)
        if node is None or node.status != "up":
            yield node_id, node


def given_up_at_s(state: State, run: Run, worker: Worker, node: Node | None, lost: Collection[str] = ()) -> float:
    """When this worker on a node that does not answer counts as gone, unless news come before; 0 for at once.
    `lost`: nodes that are about to be."""
    if node is None:
        return 0.0
    lease_s = node.silent_at_s + LEASE_S + LEASE_MARGIN_S
    if not exits.exact(run):
        return lease_s
    if node.status == "lost" or node.id in lost:
        return 0.0 if _goes_on(state, run, node) else node.silent_at_s + HOLDERS_PATIENCE_S
    member = run.generation is not None and worker.index in run.generation.members
    if not member or worker.leaving in ("stop", "abort", "release"):
        patience_s = node.silent_at_s + BYSTANDER_PATIENCE_S
        return patience_s if any(other.status == "up" for other in state.nodes.values()) else lease_s
    # They may well go on committing where nobody else sees it; who is stuck on them would say so.
    return lease_s


def _goes_on(state: State, run: Run, lost: Node) -> bool:
    """Whether the run has somebody who holds its newest step where it can be reached, or none to wait for at all."""
    if run.generation is None or run.status not in ("running", "pausing"):
        return True
    for worker in run.live_workers:
        node = state.nodes.get(worker.node)
        if node is not None and node.status == "up" and exits.holds_state(run, worker, lost.silent_at_s, HOLDS_AFTER_S):
            return True
    return not any(
        worker.live and worker.node == lost.id for worker in map(run.workers.get, run.generation.members) if worker
    )


def waits(state: State, now_s: float, due: list[float]) -> dict[str, Reason]:
    """Why runs with workers on nodes that do not answer are as they are; their times go into `due`."""
    reasons: dict[str, Reason] = {}
    for node_id, node in away(state):
        for run, worker in _workers_on(state, node_id):
            at_s = given_up_at_s(state, run, worker, node)
            due.append(at_s)
            if run.id not in reasons:
                reasons[run.id] = _wait(run, worker, node, now_s, at_s)
    return reasons


def why(state: State, run: Run, now_s: float) -> Reason | None:
    """The same for one run, with the times as of now; None if all its nodes answer."""
    for worker in run.live_workers:
        node = state.nodes.get(worker.node)
        if node is not None and node.status != "up":
            return _wait(run, worker, node, now_s, given_up_at_s(state, run, worker, node))
    return None


def _wait(run: Run, worker: Worker, node: Node | None, now_s: float, at_s: float) -> Reason:
    assert node is not None
    silent_s, left_s = max(0.0, now_s - node.silent_at_s), max(0.0, at_s - now_s)
    counts: dict[str, int | float] = {"silent_s": round(silent_s, 1), "left_s": round(left_s, 1)}
    began = f"its node {node.id} has not answered for {format_duration(silent_s)}"
    if exits.exact(run) and node.status == "lost":
        text = f"{began} and alone holds the newest step: back to the checkpoint in {format_duration(left_s)}"
        return Reason(code="waits-state", text=text, counts=counts)
    if exits.exact(run):
        text = f"{began}, and nobody is stuck on its workers there: given up then, or in {format_duration(left_s)}"
        return Reason(code="node-silent", text=text, counts=counts)
    moves = "moves" if run.retries_used < run.spec.retries else "counts as lost"
    if run.status == "stopping":
        moves = "counts as stopped"
    text = (
        f"{began}; it {moves} in {format_duration(left_s)}, or at once after"
        f" `racimo nodes forget {node.id} --confirm-dead`"
    )
    return Reason(code="waits-lease", text=text, counts=counts)


def _workers_on(state: State, node_id: str) -> Iterator[tuple[Run, Worker]]:
    for name in state.on_node[node_id]:
        run_id, _, index = parse_worker_id(name)
        run = state.runs[run_id]
        yield run, run.workers[index]


def _gone(state: State, workers: list[Worker], now_s: float) -> Reason:
    node = state.nodes.get(workers[0].node)
    what = ("worker " if len(workers) == 1 else "workers ") + ", ".join(str(worker.index) for worker in workers)
    counts: dict[str, int | float] = {"workers": len(workers)}
    if node is None:
        text = f"{workers[0].node} was declared dead: {what} went with it"
        return Reason(code="node-forgotten", text=text, counts=counts)
    silent_s = max(0.0, now_s - node.silent_at_s)
    verb = "counts" if len(workers) == 1 else "count"
    text = f"{node.id} has not answered for {format_duration(silent_s)}: {what} {verb} as gone"
    return Reason(code="node-lost", text=text, counts={**counts, "silent_s": round(silent_s, 1)})
