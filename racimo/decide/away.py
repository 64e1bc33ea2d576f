"""Nodes that do not answer: when one is given up, and how long what runs there keeps its lease.

Silence alone proves nothing: whoever restarts the head silences everyone. A silent node is given up once a worker
elsewhere is stuck on one of its workers. Exact runs then go on without it at once, since their generations fence what
may still live there; only one that would have to go back to its checkpoint gives the node some time. A run that only
its user understands keeps its lease until the node's agent must have ended it, so that no two attempts of it ever live.
"""

import math
from collections.abc import Iterator
from functools import cached_property

from racimo.decide import exits
from racimo.decide.fit import Pool, ask_of
from racimo.spec.quantity import format_duration
from racimo.state.events import Intent, NodeLost, WorkersLost
from racimo.state.fold import State
from racimo.state.lease import LEASE_S
from racimo.state.nouns import Node, Reason, Run, Worker, parse_worker_id

LEASE_MARGIN_S = 30.0
"""How much longer the control process waits: for the agent's killing, and for clocks that differ in rate."""
BYSTANDER_PATIENCE_S = 10.0
"""How long an exact run waits for a silent node's workers that hold nothing of it: newcomers, and who is to leave."""

HOLDERS_PATIENCE_S = 60.0
"""How long an exact run waits for a lost node if nobody elsewhere holds its newest step."""
HOLDS_AFTER_S = 5.0
"""How long before its peers fell silent a member must have been ready to count as holding the newest step."""


class Away:
    """The nodes that do not answer, at one moment. `due_s`: when time alone would change something, after `give_up`."""

    def __init__(self, state: State, now_s: float) -> None:
        self.due_s: float | None = None
        self._state, self._now_s = state, now_s
        self._lost: set[str] = set()

    def give_up(self) -> list[Intent]:
        """Nodes that count as lost from now on, and the workers that count as gone with their nodes."""
        intents: list[Intent] = []
        for node_id, witness in sorted(self._state.stuck.items()):
            if self._state.nodes[node_id].status == "silent":
                self._lost.add(node_id)
                text = f"{node_id} does not answer and worker {witness} waits for one on it: given up until it is back"
                intents.append(NodeLost(node=node_id, reason=Reason(code="node-lost", text=text)))
        gone: dict[tuple[str, int], list[Worker]] = {}
        due_s = math.inf
        for run, worker, node in self._workers():
            at_s = self._given_up_at_s(run, worker, node)
            if at_s <= self._now_s:
                gone.setdefault((run.id, run.attempt), []).append(worker)
            else:
                due_s = min(due_s, at_s)
        self.due_s = due_s if due_s < math.inf else None
        for (run_id, attempt), workers in gone.items():
            indices = tuple(sorted(worker.index for worker in workers))
            reason = _gone(self._state, workers, self._now_s)
            intents.append(WorkersLost(run=run_id, attempt=attempt, indices=indices, reason=reason))
        return intents

    def why(self, run: Run) -> Reason | None:
        """Why a run with a worker on such a node is as it is, with the times as of now; None where all answer."""
        for worker in run.live_workers:
            node = self._state.nodes.get(worker.node)
            if node is not None and node.status != "up":
                return _wait(run, node, self._now_s, self._given_up_at_s(run, worker, node))
        return None

    def _workers(self) -> Iterator[tuple[Run, Worker, Node | None]]:
        """Live workers on nodes that do not answer, or (None) that were forgotten."""
        for node_id, names in self._state.on_node.items():
            node = self._state.nodes.get(node_id)
            if node is None or node.status != "up":
                for name in names:
                    run_id, _, index = parse_worker_id(name)
                    run = self._state.runs[run_id]
                    yield run, run.workers[index], node

    def _given_up_at_s(self, run: Run, worker: Worker, node: Node | None) -> float:
        """When this worker counts as gone, unless news come before: 0 for at once, `inf` for only then."""
        if node is None:
            return 0.0
        lease_s = node.silent_at_s + LEASE_S + LEASE_MARGIN_S
        if not exits.exact(run):
            return lease_s
        if node.status == "lost" or node.id in self._lost:
            if self._goes_on(run, node):
                return 0.0
            return node.silent_at_s + HOLDERS_PATIENCE_S if self._has_place(run) else math.inf
        member = run.generation is not None and worker.index in run.generation.members
        if not member or worker.leaving in ("stop", "abort", "release"):
            return node.silent_at_s + BYSTANDER_PATIENCE_S if self._anyone_answers else lease_s
        if self._regroups(run):
            return 0.0
        # They may well go on committing where nobody else sees it; who is stuck on them would say so.
        return lease_s if self._has_place(run) else math.inf

    def _goes_on(self, run: Run, lost: Node) -> bool:
        """Whether the run has somebody who holds its newest step where it can be reached, or none to wait for."""
        if run.generation is None or run.status not in ("running", "pausing"):
            return True
        if self._holder_answers(run, lost):
            return True
        return not any(w.index in run.generation.members and w.node == lost.id for w in run.live_workers)

    def _holder_answers(self, run: Run, lost: Node) -> bool:
        return any(
            self._answers(worker) and exits.holds_state(run, worker, lost.silent_at_s, HOLDS_AFTER_S)
            for worker in run.live_workers
        )

    def _regroups(self, run: Run) -> bool:
        """Whether a generation is about to be formed without members on a lost node: its announcement could not reach
        members on silent ones either, so the others would only wait for them in it."""
        nodes = [self._state.nodes[worker.node] for worker in run.live_workers if worker.node in self._state.nodes]
        lost = [node for node in nodes if node.status == "lost" or node.id in self._lost]
        return any(self._holder_answers(run, node) for node in lost)

    def _has_place(self, run: Run) -> bool:
        """Whether giving its workers up would help: some are left, or there are machines on which it could begin anew.
        Where the head alone is cut off there are none, and what goes on elsewhere is best left alone."""
        if any(self._answers(worker) for worker in run.live_workers):
            return True
        return self._usable.room(ask_of(run)) >= run.least

    def _answers(self, worker: Worker) -> bool:
        node = self._state.nodes.get(worker.node)
        return node is not None and node.status == "up"

    @cached_property
    def _anyone_answers(self) -> bool:
        return any(node.status == "up" for node in self._state.nodes.values())

    @cached_property
    def _usable(self) -> Pool:
        return Pool.whole(self._state, answering=True, drained=False)


def _wait(run: Run, node: Node, now_s: float, at_s: float) -> Reason:
    silent_s, left_s = max(0.0, now_s - node.silent_at_s), max(0.0, at_s - now_s)
    counts: dict[str, int | float] = {"silent_s": round(silent_s, 1), "left_s": round(left_s, 1)}
    began = f"its node {node.id} has not answered for {format_duration(silent_s)}"
    if at_s == math.inf:
        text = f"{began}, and no other machine could take its place: it is left to go on there"
        return Reason(code="node-silent", text=text, counts={"silent_s": round(silent_s, 1)})
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


def _gone(state: State, workers: list[Worker], now_s: float) -> Reason:
    names = list(dict.fromkeys(worker.node for worker in workers))
    what = ("worker " if len(workers) == 1 else "workers ") + ", ".join(str(worker.index) for worker in workers)
    counts: dict[str, int | float] = {"workers": len(workers)}
    nodes = [state.nodes[name] for name in names if name in state.nodes]
    if not nodes:
        text = f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} declared dead: {what} went with it"
        return Reason(code="node-forgotten", text=text, counts=counts)
    silent_s = max(0.0, now_s - min(node.silent_at_s for node in nodes))
    verb = "counts" if len(workers) == 1 else "count"
    have = "has" if len(names) == 1 else "have"
    text = f"{', '.join(names)} {have} not answered for {format_duration(silent_s)}: {what} {verb} as gone"
    return Reason(code="node-lost", text=text, counts={**counts, "silent_s": round(silent_s, 1)})
