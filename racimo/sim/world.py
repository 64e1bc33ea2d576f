"""A whole cluster on a virtual clock, with users who ask and a fate that kills: one seed, one history."""

import random
from collections.abc import Callable

import msgspec

from racimo.act.journal import MemoryJournal
from racimo.control.core import Core
from racimo.sim.checks import Violated, Watch, check_journal, check_study, story
from racimo.sim.control import SimControl
from racimo.sim.fate import Fate
from racimo.sim.fleet import Fleet
from racimo.sim.machine import SimMachine
from racimo.sim.timeline import START_S, Timeline
from racimo.sim.worker import SimWorker
from racimo.spec.quantity import WorkerRange
from racimo.spec.run import Priority, RunSpec
from racimo.spec.study import StudySpec

CLIENT_RETRY_S = 0.25
NOT_YET = ("run-unknown", "can-never-fit", "node-unknown")
"""Answers that another moment may change: the run is not submitted yet, or a machine has not joined."""
FATE_ENDS_S = 90.0
GIVE_UP_S = 4_000.0
MANY_RETRIES = 1_000
"""Of a trial: no history kills its workers so often."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One run that a simulated user submits."""

    key: str
    at_s: float
    spec: RunSpec
    touched: bool = False
    """Stopped, paused or scaled on the way."""


class World:
    """`run()` plays the seed's history to its end and raises `Violated` if a promise broke, with the run's story.

    `faults`: all kinds, none, or those named (see `Fate`). `specs`: these runs on one machine of two devices, and
    nobody touches them; else what the seed makes up."""

    def __init__(
        self, seed: int, *, faults: bool | tuple[str, ...] = True, specs: tuple[RunSpec, ...] | None = None
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.timeline = Timeline()
        self.fleet = Fleet(self.timeline, self.rng)
        self.control = SimControl(self.timeline, self.fleet, seed)
        self.watch = Watch(self.fleet, lambda: self.control.core)
        self.asked: list[Asked] = []
        self.answers: dict[str, str] = {}
        self.disturbed: set[str] = set()
        """Runs that lost a process in a way that their code may see."""
        self.supervisor_back_s = 0.0
        self.num_pending = 0
        """Things that are still to happen, such as clients that wait for an answer."""
        self._connect()
        num_machines = self.rng.choice((1, 1, 2, 3, 4)) if specs is None else 1
        self.wide = num_machines > 1 and self.rng.random() < 0.6
        """Machines of few devices and long trainings, which span them."""
        for _ in range(num_machines):
            sizes = (1, 1, 2) if self.wide else (1, 2, 2, 3, 4, 6)
            self.fleet.add(self.rng.choice(sizes) if specs is None else 2)
        self.num_devices = sum(len(machine.node.devices) for machine in self.fleet.present)
        self.fate = Fate(self)
        if specs is None:
            self._plan_users()
        else:
            self._plan_runs(specs)
        if faults:
            self.fate.plan(faults if isinstance(faults, tuple) else ())
        self.timeline.after(FATE_ENDS_S, self._resume_forgotten)
        self.control.start()

    @property
    def core(self) -> Core | None:
        return self.control.core

    def run(self) -> None:
        try:
            while not self._done():
                if self.timeline.now_s() > START_S + GIVE_UP_S or not self.timeline.step():
                    self._fail_unfinished()
            self._check_end()
        except Violated as violated:
            records = MemoryJournal(self.control.disk).records()
            raise Violated(
                f"seed {self.seed} at {self.timeline.now_s():.3f}: {violated}\n{story(records, violated.run)}",
                violated.run,
            ) from violated

    # Making the world

    def _connect(self) -> None:
        self.fleet.on_added = self._added
        self.fleet.counts = self._counts
        self.fleet.network.on_change = self._cables_changed
        self.control.on_commit = self.watch.committed
        self.control.on_death = lambda: self._comes_back(self._start_control)

    def _added(self, machine: SimMachine) -> None:
        machine.on_start = self.watch.process_started
        machine.on_news = self.control.poke
        machine.on_agent_death = lambda: self._agent_died(machine)
        self.control.poke()

    def _counts(self, worker: SimWorker) -> bool:
        known = self.core.state.worker(worker.run, worker.attempt, worker.index) if self.core is not None else None
        return known is not None and known.live

    def _agent_died(self, machine: SimMachine) -> None:
        self.control.poke()
        self._comes_back(machine.start_agent)

    def _cables_changed(self) -> None:
        self.control.note_contact()
        self.control.poke()
        self.fleet.look()

    def _start_control(self) -> None:
        self.control.start()
        if self.core is not None:
            check_journal(self.core, MemoryJournal(self.control.disk))

    def _comes_back(self, start: Callable[[], None]) -> None:
        """The supervisor starts again what died, once it is alive itself."""
        delay_s = max(self.rng.uniform(0.05, 1.5), self.supervisor_back_s - self.timeline.now_s())
        self.timeline.after(delay_s, start)

    def _plan_runs(self, specs: tuple[RunSpec, ...]) -> None:
        for number, spec in enumerate(specs):
            asked = Asked(key=f"request-{number}", at_s=0.0, spec=spec)
            self.asked.append(asked)
            self.keep_asking(0.0, asked.key, lambda core, a=asked: core.submit(a.spec, a.key))  # type: ignore[misc]

    def _plan_users(self) -> None:
        for number in range(self.rng.randint(4, 9)):
            at_s = self.rng.uniform(0, 40)
            kind = self.rng.random()
            train = kind < (0.6 if self.wide else 0.4)
            tune = not train and kind < (0.8 if self.wide else 0.65)
            spec = self._training() if train else self._tuning() if tune else self._command()
            touched = self.rng.random() < 0.4
            asked = Asked(key=f"request-{number}", at_s=at_s, spec=spec, touched=touched)
            self.asked.append(asked)
            self.keep_asking(at_s, asked.key, lambda core, a=asked: core.submit(a.spec, a.key))  # type: ignore[misc]
            if touched:
                self._plan_touches(asked, elastic=train or tune)

    def _plan_touches(self, asked: Asked, *, elastic: bool) -> None:
        at_s = asked.at_s
        for number in range(self.rng.randint(1, 3)):
            at_s += self.rng.uniform(0.01, 8)
            kind = self.rng.choice(("stop", "pause", "pause", "scale" if elastic else "pause"))
            name = f"{kind}-{asked.key}-{number}"
            if kind == "scale":
                least = self.rng.randint(1, min(2, self.num_devices))
                workers = WorkerRange(least, min(least + self.rng.randint(0, 2), self.num_devices))
                self.keep_asking(at_s, name, lambda core, w=workers: core.scale(self._id(core, asked), w))  # type: ignore[misc]
            elif kind == "stop":
                self.keep_asking(at_s, name, lambda core: core.stop(self._id(core, asked)))
            else:
                self.keep_asking(at_s, name, lambda core: core.pause(self._id(core, asked)))
                at_s += self.rng.uniform(0.01, 10)
                self.keep_asking(at_s, f"resume-{name}", lambda core: core.resume(self._id(core, asked)))

    def _id(self, core: Core, asked: Asked) -> str:
        return core.state.requests.get(asked.key, "none")

    def keep_asking(
        self, at_s: float, name: str, request: Callable[[Core], object], then: Callable[[], None] = lambda: None
    ) -> None:
        """A client: asks until it has an answer, as a command whose connection broke does; `then` goes on."""
        self.num_pending += 1

        def ask() -> None:
            answer = self.control.ask(request)
            if not answer or (answer in NOT_YET and self.timeline.now_s() < START_S + FATE_ENDS_S):
                self.timeline.after(CLIENT_RETRY_S, ask)
                return
            self.num_pending -= 1
            self.answers[name] = answer
            then()

        self.timeline.after(at_s, ask)

    def _command(self) -> RunSpec:
        duration_s, code = self.rng.uniform(0.01, 12), 0 if self.rng.random() < 0.8 else 3
        priority: Priority = self.rng.choice(("low", "normal", "high"))
        workers = min(self.rng.choice((1, 1, 1, 2)), self.num_devices)
        # The head's machine is never lost, so there is always a node on which a worker with two devices fits.
        two_each = workers == 1 and len(self.fleet.machines["node-1"].node.devices) >= 2 and self.rng.random() < 0.2
        return RunSpec(
            command=("work", f"{duration_s:.3f}", str(code)),
            workers=workers,
            devices="cpu:2" if two_each else "",
            priority=priority,
            retries=self.rng.choice((0, 0, 1, 2)),
        )

    def _training(self) -> RunSpec:
        least = self.rng.randint(1, min(2, self.num_devices))
        most = min(least + self.rng.randint(0, 2), self.num_devices)
        if self.wide:
            least, most = min(2, self.num_devices), min(self.rng.randint(2, 4), self.num_devices)
        config = {
            "until": self.rng.randint(60, 300) if self.wide else self.rng.randint(1, 60),
            "step_s": self.rng.choice((0.02, 0.1, 0.3)),
            "ready_s": self.rng.choice((0.05, 0.5, 2.0)),
            "micro_shards": 8,
            "hang_at": 3 if self.rng.random() < 0.05 else -1,
        }
        priority: Priority = self.rng.choice(("low", "normal", "normal", "high"))
        return RunSpec(
            train="train.py:train",
            workers=f"{least}..{most}",
            config=config,
            priority=priority,
            retries=self.rng.choice((0, 0, 1)),
        )

    def _tuning(self) -> RunSpec:
        config = {
            "round_s": self.rng.choice((0.05, 0.3, 1.0)),
            "rounds": 9,
            "ready_s": self.rng.choice((0.05, 0.5, 2.0)),
        }
        study = StudySpec(
            space={"x": "0.0..1.0"},
            metric="loss",
            proposer="random",
            scheduler=self.rng.choice(("asha", "asha", "freeze-thaw", "population", "median", "none")),
            trials=self.rng.randint(1, 20),
            parallel=self.rng.choice((0, 1, 2, 4)),
            rounds=9,
            retries=MANY_RETRIES,
        )
        priority: Priority = self.rng.choice(("low", "low", "normal", "high"))
        return RunSpec(tune="tune.py:train", study=study, config=config, priority=priority)

    # The end

    def _done(self) -> bool:
        if self.num_pending or self.core is None or self.fleet.alive:
            return False
        spooled = any(machine.spool for machine in self.fleet.present)
        return self.fleet.network.whole and not self.core.state.open_runs and not spooled

    def _resume_forgotten(self) -> None:
        """A paused run whose user forgot it is resumed in the end, and a drained node is used again."""
        held = [run for run in self.core.state.runs.values() if run.hold] if self.core is not None else []
        for run in held:
            self.control.ask(lambda core, r=run.id: core.resume(r))  # type: ignore[misc]
        nodes = self.core.state.nodes.values() if self.core is not None else ()
        for name in [node.id for node in nodes if node.draining and node.id not in self.fate.leaving]:
            self.control.ask(lambda core, n=name: core.drain(n, undo=True))  # type: ignore[misc]
        if held or self.core is None or self.num_pending:
            self.timeline.after(CLIENT_RETRY_S, self._resume_forgotten)

    def _fail_unfinished(self) -> None:
        state = self.core.state if self.core is not None else None
        unfinished = list(state.open_runs) if state is not None else []
        alive = [worker.name for worker in self.fleet.alive]
        what = f"runs {unfinished} never end; alive {alive}; clients waiting {self.num_pending}"
        raise Violated(what, unfinished[0] if unfinished else "")

    def _check_end(self) -> None:
        core = self.core
        assert core is not None
        state = core.state
        check_journal(core, MemoryJournal(self.control.disk))
        if state.leases:
            raise Violated(f"all runs have ended and these leases are held: {state.leases}")
        if len(state.runs) != len(self.asked):
            raise Violated(f"{len(self.asked)} runs were submitted, there are {len(state.runs)}")
        for training in self.fleet.trainings.values():
            if training.violations:
                raise Violated("; ".join(training.violations), training.workers[0].run)
        for asked in self.asked:
            self._check_run(asked, core)

    def _check_run(self, asked: Asked, core: Core) -> None:
        run = core.state.runs[core.state.requests[asked.key]]
        starts = {worker.attempt for worker in self.fleet.workers if worker.run == run.id and worker.pid}
        if asked.spec.command and len(starts) > 1 + asked.spec.retries:
            raise Violated(f"{run.id} was tried {len(starts)} times with {asked.spec.retries} retries", run.id)
        if run.status == "stopped" and not asked.touched:
            raise Violated(f"{run.id} is stopped, and nobody asked for it", run.id)
        drained = run.failure is not None and run.failure.code == "node-drained" and self.fate.num_drains > 0
        lost_machine = any(self.fleet.machines[name].gone for name in run.nodes)
        if run.id not in self.disturbed and not lost_machine and not drained and run.status != "stopped":
            exits_0 = not asked.spec.command or asked.spec.command[2] == "0"
            hangs = asked.spec.config.get("hang_at", -1) >= 0
            expected = "succeeded" if exits_0 else "failed"
            if run.status != expected and not hangs:
                raise Violated(f"{run.id} was left alone and is {run.status}, not {expected}", run.id)
        if asked.spec.tune:
            check_study(core, run, self.fleet, MemoryJournal(self.control.disk))
            if run.status not in ("succeeded", "stopped"):
                raise Violated(f"{run.id} is {run.status}, though whatever dies it can go on", run.id)
        if run.status == "succeeded" and asked.spec.train:
            training = self.fleet.trainings[run.id]
            if training.step != training.until:
                raise Violated(f"{run.id} succeeded at step {training.step} of {training.until}", run.id)
