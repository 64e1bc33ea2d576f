"""The journal as the core keeps it: records in, state on, effects and records out once they are durable.

The cycle around it is always

    facts (submit, agent_event, node_joined, ...) -> tick() -> commit() -> take_effects(), take_records()

and an agent's events are acknowledged after `commit()`. Effects and records come out only once they are durable, so a
crash at any point loses nothing that anybody saw.
"""

from collections import deque
from typing import Protocol

from racimo.act.journal import SNAPSHOT_EVERY_RECORDS, Journal
from racimo.agent.protocol import Member
from racimo.control.effects import Announce, Effect, Forget, Slice, Start, Stop
from racimo.control.orders import slice_order
from racimo.decide import decide
from racimo.spec.quantity import parse_duration_s
from racimo.state import events as ev
from racimo.state.fold import State, apply, fold
from racimo.state.nouns import Placement, Reason, Run, Worker, parse_worker_id, worker_id
from racimo.state.trials import Grant

MAX_ROUNDS = 100
"""Decisions lead to further ones within a tick; more rounds than this is a mistake of ours."""
MIN_TICK_S = 1e-6
"""Records never share a time: `exited_at_s` then orders the deaths of an attempt."""


class Clock(Protocol):
    """The cluster's clock (seconds, never going back) and the wall clock (for people)."""

    def now_s(self) -> float: ...

    def wall_s(self) -> float: ...


class Ledger:
    """One cluster's truth. Opening it folds what `store` holds."""

    def __init__(self, store: Journal, clock: Clock) -> None:
        self.store = store
        self.clock = clock
        self.notes: list[str] = list(store.notes)
        self.waits: dict[str, Reason] = {}
        """Why each waiting run waits, as of the newest tick."""
        self.wants: dict[str, int] = {}
        """By tune run, how many trials its proposer is to propose."""
        self.next_due_s: float | None = None
        """When to tick even if nothing happens, on the cluster's clock."""
        self.state = self._open()
        self._snapshot_seq = self.state.seq
        self._met: set[str] = set()
        """Nodes that have answered in this process's life."""
        self._effects: deque[tuple[int, Effect]] = deque()
        self._records: deque[ev.Record] = deque()
        if store.was_cut:
            self._record(ev.JournalCut())

    @property
    def absent(self) -> frozenset[str]:
        """Nodes that have not answered since this process began."""
        return frozenset(self.state.nodes.keys() - self._met)

    def tick(self) -> None:
        """Decides until nothing is left to decide. Deciding twice without news between adds nothing."""
        for _ in range(MAX_ROUNDS):
            decisions = decide(self.state, self._now_s(), self.absent)
            if not decisions.intents:
                self.waits, self.wants = decisions.waits, decisions.wants
                self.next_due_s = decisions.next_due_s
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
            case ev.SliceGranted():
                self._slice(self.state.runs[event.run], event.grant)
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
        self._effect(stop_effect(run, worker, how))
        if how == "stop" and not run.elastic:
            # A frozen process sees its SIGTERM only once it is thawed.
            self._effect(stop_effect(run, worker, "thaw"))

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

    def _slice(self, run: Run, grant: Grant) -> None:
        """For the worker of the grant; nothing if that has ended or the grant was refused by the fold."""
        worker = run.workers.get(grant.worker)
        if worker is not None and worker.live and self.state.studies[run.id].grant_of(grant.worker) == grant:
            name = worker_id(run.id, run.attempt, worker.index)
            order = slice_order(run, self.state.studies[run.id], grant, self.state.nodes)
            self._effect(Slice(node=worker.node, worker=name, order=order))

    def _startable(self, name: str) -> Worker | None:
        run, attempt, index = parse_worker_id(name)
        worker = self.state.worker(run, attempt, index)
        return worker if worker is not None and worker.live else None


def stop_effect(run: Run, worker: Worker, how: str) -> Stop:
    name = worker_id(run.id, worker.attempt, worker.index)
    return Stop(node=worker.node, worker=name, how=how, grace_s=parse_duration_s(run.spec.stop_grace))  # type: ignore[arg-type]
