"""Whatever is asked and whatever happens, decisions keep their promises. Hypothesis prints the smallest breach."""

from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from racimo.act.journal import MemoryDisk, MemoryJournal
from racimo.control.core import Core
from racimo.decide import decide
from racimo.decide.away import LEASE_MARGIN_S
from racimo.decide.fit import PAIR_FRESH_S, can_never_fit
from racimo.spec.errors import RacimoError
from racimo.spec.quantity import WorkerRange
from racimo.spec.run import PRIORITY_ORDER, RunSpec
from racimo.spec.study import StudySpec
from racimo.state import events as ev
from racimo.state.fold import State, fold
from racimo.state.lease import LEASE_S
from racimo.state.nouns import Device, Exit, Failure, Node, Outcome, Run, Worker, worker_id
from racimo.state.state import placeable
from racimo.state.trials import Result

KINDS = ("cpu", "cuda")
WAITS = {"waits-devices", "waits-turn", "waits-nodes", "waits-drained", "waits-one-node", "waits-pair"}


PICK = st.integers(0, 20)
T = TypeVar("T")


def picked(items: list[T], number: int) -> T:
    return items[number % len(items)]


class _Clock:
    at_s = 50.0

    def now_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return 0.0


class Cluster(RuleBasedStateMachine):
    """Random users and a random fate, one fact at a time; the invariants look after each."""

    @initialize(nodes=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(KINDS)), min_size=1, max_size=4))
    def build(self, nodes: list[tuple[int, str]]) -> None:
        self.clock, self.disk = _Clock(), MemoryDisk()
        self.core = Core(MemoryJournal(self.disk), self.clock)
        self.requests = 0
        self.machines: dict[str, Node] = {}
        for number, (size, kind) in enumerate(nodes):
            devices = tuple(Device(index, kind) for index in range(size))
            self.machines[f"n{number}"] = Node(id=f"n{number}", host="h", devices=devices, address=f"10.0.0.{number}")
        self.everybody_joins()
        self.turn()

    def everybody_joins(self) -> None:
        for machine in self.machines.values():
            self.core.node_joined(machine)

    def turn(self) -> None:
        before = fold(MemoryJournal(self.disk).records())
        self.core.tick()
        self.core.commit()
        self.core.take_effects()
        for record in self.core.take_records():
            self.look_at(before, record)
            before = fold([record], before)

    def look_at(self, before: State, record: ev.Record) -> None:
        """Judges one record by the state it was made in."""
        event = record.event
        absent = self.core.absent
        if isinstance(event, ev.AttemptPlanned):
            run = before.runs[event.run]
            assert run.least <= len(event.placements) <= max(run.least, run.most), "a gang is started whole"
            assert not run.live_workers, "two attempts at once"
            assert event.attempt == run.attempt + 1
            for other in before.runs.values():
                if not before.unreachable:
                    assert not self.overtaken(before, run, other), f"{run.id} overtakes {other.id}"
        if isinstance(event, ev.AttemptPlanned | ev.WorkersPlanned):
            for place in event.placements:
                node = before.nodes[place.node]
                assert placeable(node) and node.id not in absent
                for device in place.devices:
                    assert (place.node, device) not in before.leases, "a device is leased twice"
                    assert device < len(node.devices)
                kind = before.runs[event.run].spec.device_demand[0]
                assert kind in ("", node.devices[0].kind)
                assert len(place.devices) == before.runs[event.run].spec.devices_per_worker
            self.no_pair_comes_again(before, event)
        if isinstance(event, ev.WorkersLost):
            self.nobody_is_lost_too_early(before, event)
        if isinstance(event, ev.GenerationAnnounced):
            run = before.runs[event.run]
            assert event.members
            assert all(run.workers[index].live and run.workers[index].status == "ready" for index in event.members)
            if run.generation is None:
                assert len(event.members) + len(self.finished(run)) >= run.least
        if isinstance(event, ev.WorkersLeaving) and event.reason.code in ("yields", "preempted"):
            self.only_the_lower_yield(before, event)
        if isinstance(event, ev.SliceGranted):
            self.nothing_runs_twice(before, event)
        if isinstance(event, ev.Intent) and not isinstance(event, ev.TrialsProposed):
            assert event.reason.text

    def only_the_lower_yield(self, before: State, event: ev.WorkersLeaving) -> None:
        """kueue#3779: what preempts never yields to whom it preempts, for its class is higher."""
        run = before.runs[event.run]
        (waiter,) = (before.runs[name[4:]] for name in event.reason.counts if name.startswith("for/"))
        assert PRIORITY_ORDER[waiter.spec.priority] < PRIORITY_ORDER[run.spec.priority]
        assert run.spec.tune or run.generation is not None, "what only its user understands is preempted"
        assert waiter.status in ("queued", "running")
        assert any(run.workers[index].live and not run.workers[index].leaving for index in event.indices)
        if event.reason.code == "yields":
            assert event.reason.counts["to"] >= run.least

    def nothing_runs_twice(self, before: State, event: ev.SliceGranted) -> None:
        study, run = before.studies[event.run], before.runs[event.run]
        trial, worker = study.trials[event.grant.trial], run.workers[event.grant.worker]
        assert worker.live and worker.status == "ready" and not worker.leaving
        assert worker.index not in study.running and trial.status in ("waiting", "paused")
        assert event.grant.number > study.num_slices
        if event.grant.state_of is not None:
            assert study.trials[event.grant.state_of].saved, "ray#9036: a state that was never written"

    def no_pair_comes_again(self, before: State, event: ev.AttemptPlanned | ev.WorkersPlanned) -> None:
        """Nodes that did not reach each other are not brought together while that is news."""
        now_s = self.clock.at_s
        run = before.runs[event.run]
        had = {worker.node for worker in run.live_workers if not worker.leaving and run.attempt == event.attempt}
        new = {place.node for place in event.placements} - had
        for pair, at_s in before.unreachable.items():
            fresh = now_s < at_s + PAIR_FRESH_S
            assert not (fresh and set(pair) & new and set(pair) <= had | new), f"{pair} in {run.id}"

    def nobody_is_lost_too_early(self, before: State, event: ev.WorkersLost) -> None:
        """What only its user understands keeps its lease on a node that does not answer, unless a person vouches."""
        run = before.runs[event.run]
        for index in event.indices:
            node = before.nodes.get(run.workers[index].node)
            assert node is None or node.status != "up"
            if node is not None and not run.elastic and run.micro_shards is None:
                assert self.clock.at_s >= node.silent_at_s + LEASE_S + LEASE_MARGIN_S

    def finished(self, run: Run) -> list[Worker]:
        return [w for w in run.workers.values() if w.exit is not None and w.exit.outcome == "finished"]

    def overtaken(self, state: State, run: Run, other: Run) -> bool:
        """Whether `other`, ahead in the order and wanting the same devices, could have been started instead."""
        if other.status != "queued" or other.id == run.id:
            return False
        ahead = (PRIORITY_ORDER[other.spec.priority], other.order) < (PRIORITY_ORDER[run.spec.priority], run.order)
        same = run.spec.device_demand[0] == other.spec.device_demand[0]
        return ahead and same and self.room(state, other) >= other.least

    def room(self, state: State, run: Run, *, free: bool = True) -> int:
        kind, per_worker = run.spec.device_demand[0], run.spec.devices_per_worker
        room = 0
        for node in state.nodes.values():
            devices = [
                d for d in node.devices if kind in ("", d.kind) and not (free and (node.id, d.index) in state.leases)
            ]
            usable = placeable(node) and node.id not in self.core.absent
            room += len(devices) // per_worker if usable else 0
        return room

    # What users do

    @rule(
        workers=st.integers(1, 4),
        extra=st.integers(0, 3),
        kind=st.sampled_from(("", "cpu", "cuda")),
        per_worker=st.integers(1, 2),
        priority=st.sampled_from(tuple(PRIORITY_ORDER)),
        retries=st.integers(0, 2),
        what=st.sampled_from(("train", "command", "tune")),
    )
    def submit(
        self, workers: int, extra: int, kind: str, per_worker: int, priority: str, retries: int, what: str
    ) -> None:
        self.requests += 1
        most = 1 if what == "tune" else workers + (extra if what == "train" else 0)
        asked: dict[str, Any] = {what: ("x",) if what == "command" else "t.py:f"}
        if what == "tune":
            scheduler = ("asha", "none", "freeze-thaw", "population")[extra]
            asked["study"] = StudySpec(
                space={"x": "0.0..1.0"}, metric="loss", proposer="random", scheduler=scheduler,
                trials=workers + retries, parallel=workers, rounds=3, retries=1_000,
            )  # fmt: skip
        spec = RunSpec(
            workers=f"{min(workers, most)}..{most}",
            devices=f"{kind}:{most * per_worker}" if kind else "",
            priority=priority,  # type: ignore[arg-type]
            retries=retries,
            **asked,
        )
        try:
            self.core.submit(spec, f"r{self.requests}")
        except RacimoError as error:
            assert error.code == "can-never-fit"
        self.turn()

    @rule(
        pick=PICK,
        what=st.sampled_from(("stop", "pause", "resume", "resume", "scale")),
        least=st.integers(1, 4),
        more=st.integers(0, 2),
    )
    def ask(self, pick: int, what: str, least: int, more: int) -> None:
        if not self.core.state.open_runs:
            return
        run = picked(list(self.core.state.open_runs), pick)
        try:
            if what == "scale":
                self.core.scale(run, WorkerRange(least, least + more))
            else:
                getattr(self.core, what)(run)
        except RacimoError as error:
            assert error.code in ("wrong-state", "can-never-fit", "too-many-workers", "invalid-request")
        self.turn()

    # What fate does

    def workers(self) -> list[tuple[Run, Worker]]:
        runs = [self.core.state.runs[run] for run in self.core.state.open_runs]
        return [(run, worker) for run in runs for worker in run.live_workers]

    @rule(picks=st.lists(PICK, min_size=1, max_size=6), turn=st.booleans())
    def advance(self, picks: list[int], turn: bool) -> None:
        for pick in picks:
            if not self.workers():
                return
            run, worker = picked(self.workers(), pick)
            name = {"run": run.id, "attempt": worker.attempt, "index": worker.index}
            if worker.status == "starting":
                self.core.agent_event(ev.WorkerStarted(pid=1, **name))  # type: ignore[arg-type]
            elif run.spec.train or run.spec.tune:
                self.core.agent_event(
                    ev.WorkerReady(address="a", micro_shards=4, numerics="n", **name)  # type: ignore[arg-type]
                )
        if turn:
            self.turn()

    @rule(
        pick=PICK,
        outcome=st.sampled_from(("finished", "failed", "killed", "killed", "unknown", "as asked", "as asked")),
        commits=st.integers(0, 5),
    )
    def exit(self, pick: int, outcome: str, commits: int) -> None:
        if not self.workers():
            return
        run, worker = picked(self.workers(), pick)
        asked: dict[str, Outcome] = {"pause": "paused", "release": "released"}
        real: Outcome = asked.get(worker.leaving, "killed") if outcome == "as asked" else outcome  # type: ignore[assignment]
        ending = Exit(outcome=real, code=0)
        self.core.agent_event(
            ev.WorkerExited(run=run.id, attempt=worker.attempt, index=worker.index, exit=ending, commits=commits)
        )
        self.turn()

    @rule(
        pick=PICK,
        outcome=st.sampled_from(("reached", "reached", "finished", "halted", "diverged", "failed")),
        told=st.booleans(),
        saved=st.booleans(),
    )
    def end_slice(self, pick: int, outcome: str, told: bool, saved: bool) -> None:
        running = [(run, index) for run, study in self.core.state.studies.items() for index in study.running]
        if running:
            run, index = picked(running, pick)
            self.slice_ends(run, index, outcome, told, saved)
            self.turn()

    def slice_ends(self, run: str, index: int, outcome: str, told: bool = True, saved: bool = True) -> None:
        study = self.core.state.studies[run]
        grant = study.grant_of(index)
        assert grant is not None
        rounds = max(grant.until or 3, study.trials[grant.trial].rounds)
        result = Result(
            outcome=outcome,  # type: ignore[arg-type]
            rounds=rounds,
            metrics={"loss": float(grant.trial)} if told else {},
            curve=((rounds, float(grant.trial)),) if told else (),
            saved=rounds if saved else study.trials[grant.trial].saved,
            failure=Failure(code="worker-raised", message="no") if outcome == "failed" else None,
        )
        attempt = self.core.state.runs[run].attempt
        self.core.agent_event(ev.SliceEnded(run=run, attempt=attempt, index=index, number=grant.number, result=result))

    @rule(pick=PICK)
    def hang(self, pick: int) -> None:
        ready = [(run, worker) for run, worker in self.workers() if worker.status == "ready"]
        if ready:
            run, worker = picked(ready, pick)
            failure = Failure(code="worker-hung", message="hangs")
            self.core.agent_event(
                ev.WorkerHung(run=run.id, attempt=worker.attempt, index=worker.index, failure=failure)
            )
            self.turn()

    @rule(seconds=st.floats(0.01, 40))
    def wait(self, seconds: float) -> None:
        self.clock.at_s += seconds
        self.turn()

    @rule(pick=PICK, what=st.sampled_from(("silent", "silent", "joins", "joins", "forgotten")), turn=st.booleans())
    def node(self, pick: int, what: str, turn: bool) -> None:
        machine = picked(list(self.machines.values()), pick)
        if what == "joins":
            self.core.node_joined(machine)
        elif what == "silent":
            self.core.node_silent(machine.id)
        else:
            self.vouch_dead(machine.id)
        if turn or self.core.store.durable_seq == self.core.state.seq:
            self.turn()

    def vouch_dead(self, node: str) -> None:
        try:
            self.core.forget_node(node, confirm_dead=True)
        except RacimoError as error:
            assert error.code in ("node-unknown", "wrong-state")

    @rule(pick=PICK, deadline_s=st.sampled_from((None, 0.0, 5.0)), undo=st.booleans())
    def drain(self, pick: int, deadline_s: float | None, undo: bool) -> None:
        try:
            self.core.drain(picked(list(self.machines), pick), deadline_s, undo)
        except RacimoError as error:
            assert error.code in ("node-unknown", "wrong-state")
        self.turn()

    @rule(pick=PICK, other=PICK, stuck=st.booleans())
    def peers(self, pick: int, other: int, stuck: bool) -> None:
        """A worker is stuck on another of its run, or does not reach it."""
        if not self.workers():
            return
        run, worker = picked(self.workers(), pick)
        peer = picked(run.live_workers, other)
        if stuck:
            self.core.node_stuck(peer.node, worker_id(run.id, worker.attempt, worker.index))
        else:
            self.core.pair_unreachable(run.id, worker.index, peer.index)
        self.turn()

    @rule(snapshot=st.booleans(), joins=st.booleans())
    def restart(self, snapshot: bool, joins: bool) -> None:
        self.turn()
        if snapshot:
            self.core.save_snapshot()
        self.core = Core(MemoryJournal(self.disk), self.clock)
        self.core.come_up()
        if joins:
            for node in [node for node in self.core.state.nodes.values() if node.status == "up"]:
                self.core.node_joined(self.machines[node.id])
        self.turn()

    # What must always hold

    @invariant()
    def state_is_the_fold_and_survives_a_snapshot(self) -> None:
        """No second account that can disagree (kueue#10181: corrupted expectations in memory, the scheduler stops)."""
        if not hasattr(self, "core"):
            return
        state = self.core.state
        assert State.from_bytes(state.to_bytes()) == state
        if self.core.store.durable_seq == state.seq:
            assert fold(MemoryJournal(self.disk).records()) == state

    @invariant()
    def deciding_twice_adds_nothing(self) -> None:
        if hasattr(self, "core") and self.core.store.durable_seq == self.core.state.seq:
            decisions = decide(self.core.state, self.core._now_s(), self.core.absent)
            assert decisions.intents == ()
            assert decisions.next_due_s is None or decisions.next_due_s > self.core._now_s(), "a clock that spins"

    @invariant()
    def nobody_waits_without_a_reason_or_while_it_could_run(self) -> None:
        if not hasattr(self, "core") or self.core.store.durable_seq != self.core.state.seq:
            return
        state = self.core.state
        queued = [state.runs[run] for run in state.open_runs if state.runs[run].status == "queued"]
        for run in queued:
            assert self.core.why(run.id).code in WAITS
        first = min(queued, key=lambda run: (PRIORITY_ORDER[run.spec.priority], run.order), default=None)
        hungry = any(
            reason.code in ("waits-devices", "waits-one-node") and state.runs[run].status == "running"
            for run, reason in self.core.waits.items()
        )
        apart = any(self.clock.at_s < at_s + PAIR_FRESH_S for at_s in state.unreachable.values())
        if first is not None and not hungry and not apart:
            assert self.room(state, first) < first.least, f"{first.id} is first and fits, but waits"
        if queued and not state.leases and not apart:
            assert all(self.room(state, run, free=False) < run.least for run in queued), "an idle cluster and a queue"

    def teardown(self) -> None:
        """No starvation: once nothing new is asked and everything that starts ends, every run that fits ends."""
        if not hasattr(self, "core"):
            return
        self.everybody_joins()
        for node in [node for node in self.core.state.nodes.values() if node.draining]:
            self.core.drain(node.id, undo=True)
        self.clock.at_s += PAIR_FRESH_S
        for _ in range(300):
            for run in [self.core.state.runs[run] for run in self.core.state.open_runs]:
                if run.hold:
                    self.core.resume(run.id)
            self.clock.at_s += 60
            self.turn()
            workers = self.workers()
            if not workers:
                break
            for run_id, study in self.core.state.studies.items():
                for index in list(study.running):
                    self.slice_ends(run_id, index, "finished")
            for run, worker in workers:
                if run.spec.tune and not worker.leaving:
                    if worker.status != "ready":
                        name = {"run": run.id, "attempt": worker.attempt, "index": worker.index}
                        ready = ev.WorkerReady(address="a", micro_shards=4, numerics="n", **name)  # type: ignore[arg-type]
                        self.core.agent_event(ready)
                    continue
                asked: dict[str, Outcome] = {"": "finished", "pause": "paused", "release": "released"}
                ending = Exit(outcome=asked.get(worker.leaving, "killed"), code=0)
                self.core.agent_event(
                    ev.WorkerExited(run=run.id, attempt=worker.attempt, index=worker.index, exit=ending)
                )
        state = self.core.state
        # What was asked while all machines were forgotten may be too much for those that came.
        fits = [run for run in state.open_runs if not can_never_fit(state, state.runs[run].spec, state.runs[run].least)]
        assert not fits, self.core.waits
        assert not self.core.state.leases


TestCluster = Cluster.TestCase
# Shrinking a long history takes minutes, and the suite has a time limit: add Phase.shrink by hand.
TestCluster.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
    print_blob=True,
)
