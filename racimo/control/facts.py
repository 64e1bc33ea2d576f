"""What nodes and workers did, as facts for the journal; what is known already, or fenced, is dropped."""

import difflib
from collections.abc import Iterable

from msgspec.structs import replace

from racimo.agent.protocol import AgentEvent, WorkerState
from racimo.control.effects import Forget, Stop
from racimo.control.ledger import Ledger
from racimo.spec.errors import RacimoError
from racimo.state import events as ev
from racimo.state.nouns import Exit, Failure, Node, Placement, Run, Worker, parse_worker_id, worker_id

FIRST_EXEC_INDEX = 1_000_000
"""Workers of `exec` commands have indices from here on; they are no part of a run and never journalled."""


class Facts(Ledger):
    """The part of the core that nodes speak to, and people about nodes."""

    def node_joined(self, node: Node) -> None:
        """The node is there, with these properties; nothing new if that is known. It stays drained if it was."""
        self._met.add(node.id)
        known = self.state.nodes.get(node.id)
        if known is None or known.status != "up" or _as_told(known) != _as_told(node):
            self._record(ev.NodeJoined(node=_as_told(node)))

    def node_knows(self, node_id: str, newest_run: int) -> None:
        """The node has kept something of a run of this number. A higher one than the journal's is of a lost record."""
        if newest_run > self.state.num_submitted:
            self.notes.append(
                f"the journal has lost records: node {node_id} ran runs up to number {newest_run}, of which it knows"
                f" {self.state.num_submitted}; what still runs of the others is ended"
            )
            self._record(ev.JournalCut(newest_run=newest_run))

    def node_silent(self, node_id: str) -> None:
        """The node does not answer: nothing new is placed there, what runs there keeps its lease."""
        node = self.state.nodes.get(node_id)
        if node is not None and node.status == "up":
            self._record(ev.NodeSilent(node=node_id))

    def node_stuck(self, node_id: str, witness: str) -> None:
        """Worker `witness` (a worker id) on a node that answers waits for one of its run on this silent node.

        Dropped while the node is not silent, and where the witness is none: say it again while it waits.
        """
        node = self.state.nodes.get(node_id)
        if node is None or node.status != "silent" or node_id in self.state.stuck:
            return
        run, attempt, index = parse_worker_id(witness)
        worker = self.state.worker(run, attempt, index)
        if worker is None or not worker.live or worker.node == node_id or not self._answers(worker.node):
            return
        if any(other.node == node_id for other in self.state.runs[run].live_workers):
            self._record(ev.NodeStuck(node=node_id, witness=witness))

    def pair_unreachable(self, run_id: str, one: int, other: int) -> None:
        """Worker `one` of the run's present attempt cannot reach `other`, though both their nodes answer."""
        run = self.state.runs.get(run_id)
        found = [run.workers.get(index) for index in (one, other)] if run is not None else []
        workers = [worker for worker in found if worker is not None and worker.live and not worker.leaving]
        if run is None or len(workers) < 2 or workers[0].node == workers[1].node:
            return
        known = (one, other) in run.unreachable or (other, one) in run.unreachable
        if not known and all(self._answers(worker.node) for worker in workers):
            self._record(ev.PairUnreachable(run=run_id, attempt=run.attempt, index=one, other=other))

    def drain(self, node_id: str, deadline_s: float | None = None, undo: bool = False) -> Node:
        """Gives the node nothing new and moves what can be moved; after `deadline_s` from now the rest is stopped.

        `RacimoError`: `node-unknown`, `wrong-state` (`undo` of what is not drained).
        """
        node = self._node(node_id)
        node_id = node.id
        if undo and not node.draining:
            raise RacimoError("wrong-state", f"{node_id} is not being drained", "racimo nodes")
        if undo or not node.draining or deadline_s is not None or node.drain_deadline_s is not None:
            self._record(ev.DrainRequested(node=node_id, deadline_s=None if undo else deadline_s, undo=undo))
        return self.state.nodes[node_id]

    def forget_node(self, node_id: str, confirm_dead: bool = False) -> None:
        """Drops a node that does not answer. `confirm_dead`: a person vouches that nothing runs there any more, so
        what had its lease there may move at once.

        `RacimoError`: `node-unknown`, `wrong-state` (it answers; or it had workers and nobody vouches).
        """
        node = self._node(node_id)
        node_id, num_workers = node.id, len(self.state.on_node.get(node.id, ()))
        if node.status == "up" and node_id in self._met:
            raise RacimoError("wrong-state", f"{node_id} answers: take it down there first", f"racimo drain {node_id}")
        if num_workers and not confirm_dead:
            workers = "a worker" if num_workers == 1 else f"{num_workers} workers"
            raise RacimoError(
                "wrong-state",
                f"{node_id} does not answer and had {workers}, which may still live there",
                f"racimo nodes forget {node_id} --confirm-dead   # if you know that it is off",
            )
        self._met.discard(node_id)
        self._record(ev.NodeForgotten(node=node_id, confirmed_dead=confirm_dead))

    def agent_event(self, event: AgentEvent) -> bool:
        """Takes what an agent saw; True if it was news. What is known already, or fenced, is dropped.

        The agent may forget the event once `commit()` has returned.
        """
        if event.index >= FIRST_EXEC_INDEX:
            return False
        if isinstance(event, ev.SliceEnded):
            return self._slice_ended(event)
        worker = self.state.worker(event.run, event.attempt, event.index)
        if worker is None or not worker.live:
            if isinstance(event, ev.WorkerStarted | ev.WorkerReady):
                self._fence(event)
            return False
        if self._known(worker, event):
            return False
        self._record(event)
        run = self.state.runs[event.run]
        if isinstance(event, ev.WorkerStarted) and worker.leaving == "pause" and not run.elastic:
            # Paused while it was being started, when there was no process to freeze yet.
            self._stop(run, worker, "pause")
        moved = isinstance(event, ev.WorkerReady) and event.address != worker.address
        if moved and run.generation and event.index in run.generation.members:
            self._announce(run)  # it can be reached at another address than the one that the others were told
        return True

    def _slice_ended(self, event: ev.SliceEnded) -> bool:
        study = self.state.studies.get(event.run)
        grant = study.grant_of(event.index) if study is not None else None
        if grant is None or grant.number != event.number:
            return False
        self._record(event)
        return True

    def resync(self, node_id: str, worker_states: Iterable[WorkerState]) -> None:
        """After an agent (re)connects with the workers whose exits it has not got acknowledged: what to do again.

        Call `node_joined` before and `tick` after it.
        """
        known = {state.worker: state for state in worker_states}
        for name, state in known.items():
            if not state.exited and not self._belongs(node_id, name):
                self._effect(Stop(node=node_id, worker=name, how="abort"))
        for forgotten, nodes in self.state.forgotten.items():
            if node_id in nodes or not nodes:
                self._effect(Forget(node=node_id, run=forgotten))
        runs: dict[str, None] = {}
        for name in list(self.state.on_node.get(node_id, ())):
            run_id, _, index = parse_worker_id(name)
            runs[run_id] = None
            self._resync_worker(self.state.runs[run_id], self.state.runs[run_id].workers[index], known.get(name))
        for run in [self.state.runs[run_id] for run_id in runs]:
            if run.generation is not None:
                self._announce(run, only_node=node_id)
            if run.id in self.state.studies:
                self._slices_again(run, node_id)

    # Within

    def _node(self, name: str) -> Node:
        """By its name, or its host's if no other node has that."""
        node = self.state.nodes.get(name)
        if node is not None:
            return node
        of_host = [node for node in self.state.nodes.values() if node.host == name]
        if len(of_host) == 1:
            return of_host[0]
        if of_host:
            words = f"host {name} has {len(of_host)} nodes: {', '.join(node.id for node in of_host)}"
            raise RacimoError("node-unknown", words, "racimo nodes")
        names = {*self.state.nodes, *(node.host for node in self.state.nodes.values())}
        near = difflib.get_close_matches(name, names, n=3)
        meant = f"; near it: {', '.join(near)}" if near else ""
        raise RacimoError("node-unknown", f"there is no node {name[:80]!r}{meant}", "racimo nodes")

    def _answers(self, node_id: str) -> bool:
        node = self.state.nodes.get(node_id)
        return node is not None and node.status == "up" and node_id in self._met

    def _known(self, worker: Worker, event: AgentEvent) -> bool:
        match event:
            case ev.WorkerStarted():
                return worker.pid == event.pid
            case ev.WorkerReady():
                told = worker.holds or not event.holds
                return worker.status == "ready" and worker.address == event.address and told
            case ev.WorkerHung():
                return worker.leaving in ("stop", "abort") or self.state.runs[event.run].failure is not None
            case _:
                return False

    def _fence(self, event: ev.WorkerStarted | ev.WorkerReady) -> None:
        """A worker that must not live reports life: it is aborted wherever it is."""
        name = worker_id(event.run, event.attempt, event.index)
        run = self.state.runs.get(event.run)
        for node in (run.nodes if run is not None else ()) or self.state.nodes:
            self._effect(Stop(node=node, worker=name, how="abort"))

    def _belongs(self, node_id: str, name: str) -> bool:
        try:
            run, attempt, index = parse_worker_id(name)
        except ValueError:
            return False
        worker = self.state.worker(run, attempt, index)
        return index >= FIRST_EXEC_INDEX or (worker is not None and worker.live and worker.node == node_id)

    def _resync_worker(self, run: Run, worker: Worker, state: WorkerState | None) -> None:
        name = worker_id(run.id, worker.attempt, worker.index)
        frozen = worker.leaving == "pause" and not run.elastic
        if state is None and worker.pid is not None:
            failure = Failure(
                code="worker-lost",
                message=f"worker {worker.index} was started, but its node knows nothing of it: how it ended is unknown",
                rank=worker.rank,
                worker=name,
            )
            self._exited(run, worker, Exit(outcome="unknown", failure=failure))
        elif state is None and worker.leaving and not frozen:
            # Never started, and now it must not be. The abort is for an order that may still be on its way.
            self._effect(Stop(node=worker.node, worker=name, how="abort"))
            self._exited(run, worker, Exit(outcome="killed"))
        elif state is None:
            self._start(
                run.id, worker.attempt, (Placement(index=worker.index, node=worker.node, devices=worker.devices),)
            )
            if frozen:
                self._stop(run, worker, "pause")
        elif worker.leaving:
            self._stop(run, worker, worker.leaving)
        elif worker.status != "ready":
            # It may have been frozen before another of the run was ready and made the run elastic.
            self._stop(run, worker, "thaw")

    def _slices_again(self, run: Run, node_id: str) -> None:
        for worker in run.live_workers:
            grant = self.state.studies[run.id].grant_of(worker.index)
            if grant is not None and worker.node == node_id:
                self._slice(run, grant)

    def _exited(self, run: Run, worker: Worker, ending: Exit) -> None:
        self._record(ev.WorkerExited(run=run.id, attempt=worker.attempt, index=worker.index, exit=ending))


def _as_told(node: Node) -> Node:
    """The node by its own account, without what others concluded about it."""
    return replace(
        node, status="up", reason=None, silent_at_s=0.0, draining=False, drain_deadline_s=None, drain_at_s=0.0
    )
