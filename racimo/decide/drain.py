"""Emptying a node: elastic workers are replaced elsewhere and then let go (or without, down to the least that the run
wants, if no device is free), everything else may end until the deadline.

A worker that is let go must leave somebody behind who holds the run's state; see `exits.holds_state`.
"""

from racimo.decide import exits, heal
from racimo.state.events import WorkersLeaving
from racimo.state.fold import LEAVING_RANK, State
from racimo.state.nouns import Failure, Node, Reason, Run, Worker

SETTLED_S = 30.0
"""How long after it was ready a member is taken to hold the state, for where nobody else does."""
LEAVE_MOST_S = 60.0
"""How long after the deadline a worker that was asked to save and leave may take; then it is ended."""


def draining(state: State) -> dict[str, Node]:
    """Nodes that are being drained, that answer and that have live workers."""
    found = (state.nodes.get(node_id) for node_id in state.on_node)
    return {node.id: node for node in found if node is not None and node.draining and node.status == "up"}


class Drain:
    """One run's part in the draining of `nodes`: who is to leave them, and who came in place of those who left."""

    def __init__(self, run: Run, nodes: dict[str, Node], now_s: float) -> None:
        self.run, self.nodes, self.now_s = run, nodes, now_s
        stay = heal.staying(run)
        self.evicted = [worker for worker in stay if worker.node in nodes]
        self.others = [worker for worker in stay if worker.node not in nodes]
        self.num_replaced = self._count_replaced()

    @property
    def size(self) -> int:
        """How many workers the run has, a worker and its replacement counted once."""
        return len(self.evicted) + len(self.others) - self.num_replaced

    def steer(self, due: list[float]) -> list[WorkersLeaving]:
        """Who leaves now; when to look again goes into `due`."""
        overdue = [worker for worker in self._there() if self._deadline_s(worker) <= self.now_s]
        due += [at_s for at_s in map(self._deadline_s, self._there()) if self.now_s < at_s < float("inf")]
        if self.run.elastic and self.run.generation is not None and self.run.status == "running":
            return self._expel(overdue, due) or self._let_go(due)
        return self._end(overdue, due) if overdue else []

    def shrink(self, num_short: int, due: list[float]) -> list[WorkersLeaving]:
        """So many find no place elsewhere: they leave without a replacement, down to the least that the run wants."""
        num_ready = sum(worker.status == "ready" for worker in (*self.evicted, *self.others))
        ready = sorted((w for w in self.evicted if w.status == "ready"), key=lambda worker: worker.index)
        going = ready[: max(0, min(num_short, num_ready - self.run.least))]
        if going and not self._settled([*self.others, *(w for w in self.evicted if w not in going)], due):
            going = going[1:]
        text = f"{going[0].node} is being drained and no other device is free: the run goes on smaller" if going else ""
        return self._leaving(going, "release", Reason(code="node-drained", text=text))

    def num_wanted(self) -> int:
        """How many replacements are still to be found for those who have to leave."""
        bound = self.run.micro_shards
        room = len(self.evicted) if bound is None else bound - len(self.evicted) - len(self.others)
        return max(0, min(len(self.evicted) - self.num_replaced, room))

    def _there(self) -> list[Worker]:
        return [worker for worker in self.run.live_workers if worker.node in self.nodes]

    def _deadline_s(self, worker: Worker) -> float:
        deadline_s = self.nodes[worker.node].drain_deadline_s
        return float("inf") if deadline_s is None else deadline_s

    def _count_replaced(self) -> int:
        if not self.evicted:
            return 0
        begun_s = min(self.nodes[worker.node].drain_at_s for worker in self.evicted)
        came = sum(worker.started_at_s >= begun_s for worker in self.others)
        left = sum(
            worker.node in self.nodes and (bool(worker.leaving) or worker.exited_at_s >= begun_s)
            for worker in self.run.workers.values()
        )
        return min(max(0, came - left), len(self.evicted))

    # Elastic runs

    def _let_go(self, due: list[float]) -> list[WorkersLeaving]:
        """As many as have a replacement that is ready; the last who is known to hold the state waits for another."""
        ready = [worker for worker in self.evicted if worker.status == "ready"]
        num_ready = len(ready) + sum(worker.status == "ready" for worker in self.others)
        going = sorted(ready, key=lambda worker: worker.index)[: max(0, num_ready - self.size)]
        if going and not self._settled([*self.others, *(w for w in self.evicted if w not in going)], due):
            going = going[1:]
        text = f"{going[0].node} is being drained: a worker elsewhere took its place" if going else ""
        return self._leaving(going, "release", Reason(code="node-drained", text=text))

    def _expel(self, overdue: list[Worker], due: list[float]) -> list[WorkersLeaving]:
        """The deadline has come: who stays goes on with fewer; where nobody stays, all save and leave."""
        going = [worker for worker in overdue if not worker.leaving]
        late = [worker for worker in overdue if worker.leaving in ("pause", "release")]
        too_late = [w for w in late if self.now_s >= self._deadline_s(w) + LEAVE_MOST_S]
        due += [self._deadline_s(worker) + LEAVE_MOST_S for worker in late if worker not in too_late]
        stay = [worker for worker in (*self.evicted, *self.others) if worker not in going]
        settled = self._settled(stay, [])
        reason = self._overdue_reason(overdue) if overdue else Reason(code="", text="")
        if going and not settled:
            going = [worker for worker in self.run.live_workers if not worker.leaving]
        ready = [worker for worker in going if worker.status == "ready"]
        rest = [worker for worker in going if worker.status != "ready"]
        return [
            *self._leaving(ready, "release" if settled else "pause", reason),
            *self._leaving([*rest, *too_late], "abort", reason),
        ]

    def _settled(self, workers: list[Worker], due: list[float]) -> bool:
        """True if one of them is taken to hold the state. When others may goes into `due`."""
        members = self.run.generation.members if self.run.generation is not None else ()
        due += [at_s for w in workers if w.index in members and (at_s := w.ready_at_s + SETTLED_S) > self.now_s]
        return any(exits.holds_state(self.run, worker, self.now_s, SETTLED_S) for worker in workers)

    # All others

    def _end(self, overdue: list[Worker], due: list[float]) -> list[WorkersLeaving]:
        """An attempt that cannot move: exact training begins anew elsewhere, what only its user understands has failed
        unless it may be retried."""
        reason, live = self._overdue_reason(overdue), self.run.live_workers
        if exits.exact(self.run):
            # While it pauses it is leaving by itself, and gets the time for that.
            late = [w for w in overdue if self.now_s >= self._deadline_s(w) + LEAVE_MOST_S]
            if self.run.status == "running" or late:
                return self._leaving(live, "abort", reason)
            due += [self._deadline_s(worker) + LEAVE_MOST_S for worker in overdue]
            return []
        failure = Failure(code="node-drained", message=reason.text, hint="racimo nodes", rank=overdue[0].rank)
        return self._leaving(live, "stop", reason, failure)

    def _overdue_reason(self, overdue: list[Worker]) -> Reason:
        text = f"{overdue[0].node} was drained and its deadline has passed"
        return Reason(code="node-drained", text=text, counts={"workers": len(overdue)})

    def _leaving(
        self, workers: list[Worker], how: str, reason: Reason, failure: Failure | None = None
    ) -> list[WorkersLeaving]:
        indices = tuple(w.index for w in workers if LEAVING_RANK[w.leaving] < LEAVING_RANK[how])
        if not indices:
            return []
        return [
            WorkersLeaving(
                run=self.run.id,
                attempt=self.run.attempt,
                indices=indices,
                how=how,  # type: ignore[arg-type]
                reason=reason,
                failure=failure,
            )
        ]
