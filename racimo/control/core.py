"""The heart of the control process without I/O: facts in, journal, state, decisions, effects out.

The real control process and the simulation use this class unchanged. The cycle around it is always

    facts (submit, agent_event, node_joined, ...) -> tick() -> commit() -> take_effects(), take_records()

and an agent's events are acknowledged after `commit()`. Effects and records come out only once they are durable, so a
crash at any point loses nothing that anybody saw.
"""

from collections import deque
from collections.abc import Iterable
from typing import Protocol

import msgspec
from msgspec.structs import replace

from racimo.act.journal import SNAPSHOT_EVERY_RECORDS, Journal
from racimo.agent.protocol import AgentEvent, FileEntry, Member, WorkerOrder, WorkerState
from racimo.control.effects import Announce, Effect, Forget, Start, Stop
from racimo.control.orders import run_name, worker_order
from racimo.control.scaling import check_scale
from racimo.decide import away, decide
from racimo.decide.fit import can_never_fit
from racimo.spec.errors import RacimoError
from racimo.spec.quantity import WorkerRange, parse_duration_s
from racimo.spec.run import RunSpec
from racimo.state import events as ev
from racimo.state.fold import State, apply, fold
from racimo.state.nouns import Exit, Failure, Node, Placement, Reason, Run, Worker, parse_worker_id, worker_id

MAX_QUEUED_RUNS = 1_000
MAX_ROUNDS = 100
"""Decisions lead to further ones within a tick; more rounds than this is a mistake of ours."""
MIN_TICK_S = 1e-6
"""Records never share a time: `exited_at_s` then orders the deaths of an attempt."""
FIRST_EXEC_INDEX = 1_000_000
"""Workers of `exec` commands have indices from here on; they are no part of a run and never journalled."""


class Clock(Protocol):
    """The cluster's clock (seconds, never going back) and the wall clock (for people)."""

    def now_s(self) -> float: ...

    def wall_s(self) -> float: ...


class TakenDown(msgspec.Struct, frozen=True):
    """Runs that go on when the cluster is up again, and runs that end with it."""

    kept: tuple[str, ...]
    stopped: tuple[str, ...]


class Core:
    """One cluster's truth and its decisions. Opening it folds what `store` holds."""

    def __init__(self, store: Journal, clock: Clock) -> None:
        self.store = store
        self.clock = clock
        self.notes: list[str] = list(store.notes)
        self.waits: dict[str, Reason] = {}
        """Why each waiting run waits, as of the newest tick."""
        self.next_due_s: float | None = None
        """When to tick even if nothing happens, on the cluster's clock."""
        self.state = self._open()
        self._snapshot_seq = self.state.seq
        self._met: set[str] = set()
        """Nodes that have answered in this process's life."""
        self._going_down = False
        self._effects: deque[tuple[int, Effect]] = deque()
        self._records: deque[ev.Record] = deque()
        if store.was_cut:
            self._record(ev.JournalCut())

    # What users ask

    def submit(self, spec: RunSpec, request: str) -> Run:
        """A new run, or the one that the same `request` made before.

        `RacimoError`: `can-never-fit` with the numbers, `queue-full`.
        """
        known = self.state.requests.get(request) if request else None
        if known is not None:
            return self.state.runs[known]
        if self._going_down:
            raise RacimoError("wrong-state", "the cluster is being taken down", "racimo up  # once it has ended")
        reason = can_never_fit(self.state, spec, spec.worker_range.least)
        if reason is not None:
            raise RacimoError("can-never-fit", reason.text, "racimo nodes  # shows what there is")
        queued = sum(self.state.runs[run].status == "queued" for run in self.state.open_runs)
        if queued >= MAX_QUEUED_RUNS:
            raise RacimoError("queue-full", f"{queued} runs wait already, and {MAX_QUEUED_RUNS} may", "racimo ps")
        run = f"{run_name(spec)}-{self.state.num_submitted + 1}"
        self._record(ev.RunSubmitted(run=run, spec=spec, request=request, wall_s=self.clock.wall_s()))
        return self.state.runs[run]

    def stop(self, run_id: str) -> Run:
        """Ends the run; nothing new if it is being stopped. `RacimoError`: `run-unknown`, `wrong-state` once ended."""
        run = self._open_run(run_id)
        if run.status != "stopping":
            self._record(ev.StopRequested(run=run_id))
        return self.state.runs[run_id]

    def pause(self, run_id: str) -> Run:
        """Holds the run until `resume`. `RacimoError`: `run-unknown`, `wrong-state`."""
        run = self._open_run(run_id)
        if run.status == "stopping":
            raise RacimoError("wrong-state", f"{run_id} is being stopped", f"racimo show {run_id}")
        if not run.hold:
            self._record(ev.PauseRequested(run=run_id))
        return self.state.runs[run_id]

    def resume(self, run_id: str) -> Run:
        """Lets a paused run go on. `RacimoError`: `run-unknown`, `wrong-state` if it is not paused."""
        run = self._open_run(run_id)
        if not run.hold:
            raise RacimoError("wrong-state", f"{run_id} is {run.status}, not paused", f"racimo show {run_id}")
        frozen = [w for w in run.live_workers if w.leaving == "pause"] if run.status == "paused" else []
        self._record(ev.ResumeRequested(run=run_id))
        for worker in frozen:
            self._effect(_stop(run, worker, "thaw"))
        return self.state.runs[run_id]

    def take_down(self) -> TakenDown:
        """The cluster is to end: what waits and exact training are held until it is up again, the rest is stopped."""
        self._going_down = True
        kept: list[str] = []
        stopped: list[str] = []
        for run in [self.state.runs[run_id] for run_id in self.state.open_runs]:
            if run.status == "paused" and not run.live_workers:
                kept.append(run.id)
            elif run.status == "queued" or (run.elastic and run.status in ("running", "pausing")):
                kept.append(run.id)
                if not run.hold:
                    self._record(ev.PauseRequested(run=run.id, until="up"))
            else:
                stopped.append(run.id)
                if run.status != "stopping":
                    self._record(ev.StopRequested(run=run.id))
        return TakenDown(kept=tuple(kept), stopped=tuple(stopped))

    def come_up(self) -> None:
        """What was held while the cluster was down queues again. Leases on nodes that are away count from now: the
        clock between two processes is the wall's, and may have jumped."""
        for node in [node for node in self.state.nodes.values() if node.status != "up"]:
            self._record(ev.NodeSilent(node=node.id))
        for run in [self.state.runs[run_id] for run_id in self.state.open_runs]:
            if run.hold == "down":
                self._record(ev.ResumeRequested(run=run.id))

    def scale(self, run_id: str, workers: WorkerRange) -> Run:
        """Changes how many workers the run may have.

        `RacimoError`: `run-unknown`, `wrong-state` (ended, or running and not elastic), `too-many-workers`,
        `can-never-fit`, `invalid-request` (a range for a command).
        """
        run = self._open_run(run_id)
        check_scale(self.state, run, workers)
        if (run.least, run.most) != (workers.least, workers.most):
            self._record(ev.ScaleRequested(run=run_id, least=workers.least, most=workers.most))
        return self.state.runs[run_id]

    # What nodes and workers did

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
        node, num_workers = self._node(node_id), len(self.state.on_node.get(node_id, ()))
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
        for run_id in runs:
            if self.state.runs[run_id].generation is not None:
                self._announce(self.state.runs[run_id], only_node=node_id)

    # The wheel

    def tick(self) -> None:
        """Decides until nothing is left to decide. Deciding twice without news between adds nothing."""
        for _ in range(MAX_ROUNDS):
            decisions = decide(self.state, self._now_s(), self.absent)
            if not decisions.intents:
                self.waits, self.next_due_s = decisions.waits, decisions.next_due_s
                return
            for intent in decisions.intents:
                self._record(intent)
        raise AssertionError(f"decisions do not settle: {decisions.intents}")

    def commit(self) -> None:
        """Makes all of it durable. `RacimoError`: `disk-full`; nothing is lost or half done, call it again later."""
        self.store.commit()
        if self.state.seq == self.store.durable_seq and self.state.seq - self._snapshot_seq >= SNAPSHOT_EVERY_RECORDS:
            self.save_snapshot()

    def save_snapshot(self) -> None:
        """Keeps the state as it is, so that the next opening is quick; after `commit()`, and on a clean close."""
        if self._snapshot_seq < self.state.seq == self.store.durable_seq:
            self.store.save_snapshot(self.state.seq, self.state.to_bytes())
            self._snapshot_seq = self.state.seq

    def take_effects(self) -> list[Effect]:
        """What is durable and to be carried out now, in order, each once; a lost one comes again through `resync`."""
        taken: list[Effect] = []
        while self._effects and self._effects[0][0] <= self.store.durable_seq:
            effect = self._effects.popleft()[1]
            if not isinstance(effect, Start) or self._startable(effect.worker) is not None:
                taken.append(effect)
        return taken

    def take_records(self) -> list[ev.Record]:
        """The records that became durable since the last call, in order, each once."""
        taken: list[ev.Record] = []
        while self._records and self._records[0].seq <= self.store.durable_seq:
            taken.append(self._records.popleft())
        return taken

    def why(self, run_id: str) -> Reason:
        """Why the run is where it is: the planner's own words. `RacimoError`: `run-unknown`."""
        run = self.run(run_id)
        reason = away.why(self.state, run, self._now_s()) or self.waits.get(run_id) or run.reason
        return reason or Reason(code="submitted", text="submitted; the next decision places it")

    def run(self, run_id: str) -> Run:
        """`RacimoError`: `run-unknown`."""
        run = self.state.runs.get(run_id)
        if run is None:
            raise RacimoError("run-unknown", f"there is no run {run_id!r}", "racimo ps --all")
        return run

    def order_for(
        self, worker: str, files: tuple[FileEntry, ...] = (), secrets: dict[str, str] | None = None
    ) -> WorkerOrder:
        """The order for a worker of the present attempt, as named by a `Start`."""
        run_id, attempt, index = parse_worker_id(worker)
        found = self.state.worker(run_id, attempt, index)
        assert found is not None, worker
        return worker_order(self.state.runs[run_id], found, self.state.nodes, files, secrets)

    @property
    def absent(self) -> frozenset[str]:
        """Nodes that have not answered since this process began."""
        return frozenset(self.state.nodes.keys() - self._met)

    # Within

    def _node(self, node_id: str) -> Node:
        node = self.state.nodes.get(node_id)
        if node is None:
            raise RacimoError("node-unknown", f"there is no node {node_id!r}", "racimo nodes")
        return node

    def _answers(self, node_id: str) -> bool:
        node = self.state.nodes.get(node_id)
        return node is not None and node.status == "up" and node_id in self._met

    def _open(self) -> State:
        content, records = self.store.load()
        if content is None:
            return fold(records)
        try:
            state = State.from_bytes(content)
        except ValueError as error:
            self.notes.append(f"the journal's snapshot cannot be used ({error}): all its records were read instead")
            return fold(self.store.records())
        return fold(records, state)

    def _now_s(self) -> float:
        return max(self.clock.now_s(), self.state.at_s)

    def _record(self, event: ev.Event) -> None:
        at_s = max(self.clock.now_s(), self.state.at_s + MIN_TICK_S)
        record = ev.Record(seq=self.state.seq + 1, at_s=at_s, wall_s=self.clock.wall_s(), event=event)
        self.store.append(record)
        apply(self.state, record)
        self._records.append(record)
        match event:
            case ev.AttemptPlanned() | ev.WorkersPlanned():
                self._start(event.run, event.attempt, event.placements)
            case ev.WorkersLeaving():
                self._leave(event)
            case ev.GenerationAnnounced():
                self._announce(self.state.runs[event.run])
            case ev.RunForgotten():
                for node in self.state.forgotten.get(event.run) or self.state.nodes:
                    self._effect(Forget(node=node, run=event.run))
            case _:
                pass

    def _effect(self, effect: Effect) -> None:
        self._effects.append((self.state.seq, effect))

    def _start(self, run: str, attempt: int, placements: tuple[Placement, ...]) -> None:
        for place in placements:
            name = worker_id(run, attempt, place.index)
            self._effect(Start(node=place.node, worker=name, run=run, attempt=attempt, placement=place))

    def _leave(self, event: ev.WorkersLeaving) -> None:
        run = self.state.runs[event.run]
        for index in event.indices:
            worker = run.workers[index]
            if worker.live:
                self._stop(run, worker, event.how)

    def _stop(self, run: Run, worker: Worker, how: str) -> None:
        self._effect(_stop(run, worker, how))
        if how == "stop" and not run.elastic:
            # A frozen process sees its SIGTERM only once it is thawed.
            self._effect(_stop(run, worker, "thaw"))

    def _announce(self, run: Run, only_node: str = "") -> None:
        generation = run.generation
        assert generation is not None
        members = tuple(
            Member(worker_id(run.id, run.attempt, index), run.workers[index].address) for index in generation.members
        )
        nodes = dict.fromkeys(worker.node for worker in run.live_workers)
        for node in nodes:
            if not only_node or node == only_node:
                effect = Announce(
                    node=node,
                    run=run.id,
                    attempt=run.attempt,
                    number=generation.number,
                    members=members,
                    reason=generation.reason.text,
                )
                self._effect(effect)

    def _known(self, worker: Worker, event: AgentEvent) -> bool:
        match event:
            case ev.WorkerStarted():
                return worker.pid == event.pid
            case ev.WorkerReady():
                return worker.status == "ready" and worker.address == event.address
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

    def _startable(self, name: str) -> Worker | None:
        run, attempt, index = parse_worker_id(name)
        worker = self.state.worker(run, attempt, index)
        return worker if worker is not None and worker.live else None

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
        elif not run.elastic:
            self._stop(run, worker, "thaw")

    def _exited(self, run: Run, worker: Worker, ending: Exit) -> None:
        self._record(ev.WorkerExited(run=run.id, attempt=worker.attempt, index=worker.index, exit=ending))

    def _open_run(self, run_id: str) -> Run:
        run = self.run(run_id)
        if run.ended:
            raise RacimoError("wrong-state", f"{run_id} has ended already: {run.status}", f"racimo show {run_id}")
        return run


def _as_told(node: Node) -> Node:
    """The node by its own account, without what others concluded about it."""
    return replace(
        node, status="up", reason=None, silent_at_s=0.0, draining=False, drain_deadline_s=None, drain_at_s=0.0
    )


def _stop(run: Run, worker: Worker, how: str) -> Stop:
    name = worker_id(run.id, worker.attempt, worker.index)
    return Stop(node=worker.node, worker=name, how=how, grace_s=parse_duration_s(run.spec.stop_grace))  # type: ignore[arg-type]
