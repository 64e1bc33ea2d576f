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

from racimo.act.journal import SNAPSHOT_EVERY_RECORDS, Journal
from racimo.agent.protocol import AgentEvent, FileEntry, Member, WorkerOrder, WorkerState
from racimo.control.effects import Announce, Effect, Forget, Start, Stop
from racimo.control.orders import run_name, worker_order
from racimo.control.scaling import check_scale
from racimo.decide import decide
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

    def __init__(self, store: Journal, clock: Clock, seed: int = 0) -> None:
        self.store = store
        self.clock = clock
        self.seed = seed
        self.notes: list[str] = list(store.notes)
        self.waits: dict[str, Reason] = {}
        """Why each waiting run waits, as of the newest tick."""
        self.next_due_s: float | None = None
        """When to tick even if nothing happens, on the cluster's clock."""
        self.state = self._open()
        self._snapshot_seq = self.state.seq
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
        """What was held while the cluster was down queues again."""
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
        """The node is there, with these properties; nothing new if that is known."""
        if self.state.nodes.get(node.id) != node:
            self._record(ev.NodeJoined(node=node))

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
        if node is not None and node.status != "silent":
            self._record(ev.NodeSilent(node=node_id))

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
        for forgotten in self.state.forgotten:
            self._effect(Forget(node=node_id, run=forgotten))
        for run in [self.state.runs[run] for run in self.state.open_runs]:
            for worker in run.live_workers:
                if worker.node == node_id:
                    self._resync_worker(run, worker, known.get(worker_id(run.id, worker.attempt, worker.index)))
            if run.generation is not None:
                self._announce(self.state.runs[run.id], only_node=node_id)

    # The wheel

    def tick(self) -> None:
        """Decides until nothing is left to decide. Deciding twice without news between adds nothing."""
        for _ in range(MAX_ROUNDS):
            decisions = decide(self.state, self._now_s(), self.seed)
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
        reason = self.waits.get(run_id) or run.reason
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
        return worker_order(self.state.runs[run_id], found, files, secrets)

    # Within

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
                for node in self.state.nodes:
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
        for node in self.state.nodes:
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


def _stop(run: Run, worker: Worker, how: str) -> Stop:
    name = worker_id(run.id, worker.attempt, worker.index)
    return Stop(node=worker.node, worker=name, how=how, grace_s=parse_duration_s(run.spec.stop_grace))  # type: ignore[arg-type]
