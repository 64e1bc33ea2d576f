"""A whole cluster on a virtual clock, with users who ask and a fate that kills: one seed, one history."""

import random
from collections.abc import Callable

import msgspec

from racimo.act.journal import MemoryJournal
from racimo.control.core import Core
from racimo.sim.checks import Violated, Watch, check_journal, story
from racimo.sim.control import SimControl
from racimo.sim.machine import SimMachine
from racimo.sim.timeline import START_S, Timeline
from racimo.spec.quantity import WorkerRange
from racimo.spec.run import Priority, RunSpec

CLIENT_RETRY_S = 0.25
FATE_ENDS_S = 90.0
GIVE_UP_S = 4_000.0


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One run that a simulated user submits."""

    key: str
    at_s: float
    spec: RunSpec
    touched: bool = False
    """Stopped, paused or scaled on the way."""


class World:
    """`run()` plays the seed's history to its end and raises `Violated` if a promise broke, with the run's story."""

    def __init__(self, seed: int, *, faults: bool = True) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.timeline = Timeline()
        self.machine = SimMachine(self.timeline, self.rng, num_devices=self.rng.choice((2, 3, 4, 6)))
        self.control = SimControl(self.timeline, self.machine, seed)
        self.watch = Watch(self.machine)
        self.asked: list[Asked] = []
        self.answers: dict[str, str] = {}
        self.killed_workers: set[str] = set()
        self.num_faults: dict[str, int] = {}
        self._supervisor_back_s = 0.0
        self._pending = 0
        self._connect()
        self._plan_users()
        if faults:
            self._plan_fate()
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
        self.machine.on_start = self.watch.process_started
        self.machine.on_news = self.control.poke
        self.machine.on_agent_death = lambda: self._comes_back(self.machine.start_agent)
        self.control.on_commit = self.watch.committed
        self.control.on_death = lambda: self._comes_back(self._start_control)

    def _start_control(self) -> None:
        self.control.start()
        if self.core is not None:
            check_journal(self.core, MemoryJournal(self.control.disk))

    def _comes_back(self, start: Callable[[], None]) -> None:
        """The supervisor starts again what died, once it is alive itself."""
        delay_s = max(self.rng.uniform(0.05, 1.5), self._supervisor_back_s - self.timeline.now_s())
        self.timeline.after(delay_s, start)

    def _plan_users(self) -> None:
        for number in range(self.rng.randint(4, 9)):
            at_s = self.rng.uniform(0, 40)
            train = self.rng.random() < 0.5
            spec = self._training() if train else self._command()
            touched = self.rng.random() < 0.4
            asked = Asked(key=f"request-{number}", at_s=at_s, spec=spec, touched=touched)
            self.asked.append(asked)
            self._keep_asking(at_s, asked.key, lambda core, a=asked: core.submit(a.spec, a.key))  # type: ignore[misc]
            if touched:
                self._plan_touches(asked, elastic=train)

    def _plan_touches(self, asked: Asked, *, elastic: bool) -> None:
        at_s = asked.at_s
        for number in range(self.rng.randint(1, 3)):
            at_s += self.rng.uniform(0.01, 8)
            kind = self.rng.choice(("stop", "pause", "pause", "scale" if elastic else "pause"))
            name = f"{kind}-{asked.key}-{number}"
            if kind == "scale":
                least = self.rng.randint(1, 2)
                workers = WorkerRange(least, min(least + self.rng.randint(0, 2), len(self.machine.node.devices)))
                self._keep_asking(at_s, name, lambda core, w=workers: core.scale(self._id(core, asked), w))  # type: ignore[misc]
            elif kind == "stop":
                self._keep_asking(at_s, name, lambda core: core.stop(self._id(core, asked)))
            else:
                self._keep_asking(at_s, name, lambda core: core.pause(self._id(core, asked)))
                at_s += self.rng.uniform(0.01, 10)
                self._keep_asking(at_s, f"resume-{name}", lambda core: core.resume(self._id(core, asked)))

    def _id(self, core: Core, asked: Asked) -> str:
        return core.state.requests.get(asked.key, "none")

    def _keep_asking(self, at_s: float, name: str, request: Callable[[Core], object]) -> None:
        """A client: asks until it has an answer, as a command whose connection broke does."""
        self._pending += 1

        def ask() -> None:
            answer = self.control.ask(request)
            if not answer or (answer == "run-unknown" and self.timeline.now_s() < START_S + FATE_ENDS_S):
                self.timeline.after(CLIENT_RETRY_S, ask)
                return
            self._pending -= 1
            self.answers[name] = answer

        self.timeline.after(at_s, ask)

    def _command(self) -> RunSpec:
        duration_s, code = self.rng.uniform(0.01, 12), 0 if self.rng.random() < 0.8 else 3
        priority: Priority = self.rng.choice(("low", "normal", "high"))
        return RunSpec(
            command=("work", f"{duration_s:.3f}", str(code)),
            workers=self.rng.choice((1, 1, 1, 2)),
            priority=priority,
            retries=self.rng.choice((0, 0, 1, 2)),
        )

    def _training(self) -> RunSpec:
        least = self.rng.randint(1, 2)
        most = min(least + self.rng.randint(0, 2), len(self.machine.node.devices))
        config = {
            "until": self.rng.randint(1, 60),
            "step_s": self.rng.choice((0.02, 0.1, 0.3)),
            "ready_s": self.rng.choice((0.05, 0.5, 2.0)),
            "micro_shards": 8,
            "hang_at": 3 if self.rng.random() < 0.05 else -1,
        }
        return RunSpec(
            train="train.py:train", workers=f"{least}..{most}", config=config, retries=self.rng.choice((0, 0, 1))
        )

    def _plan_fate(self) -> None:
        kinds: dict[str, Callable[[], None]] = {
            "control": lambda: self.control.kill(),
            "control at a boundary": self._kill_at_boundary,
            "storm": self._storm,
            "agent": self.machine.kill_agent,
            "agent in a request": self._kill_in_request,
            "zygote": self._kill_zygote,
            "supervisor": self._kill_supervisor,
            "worker": self._kill_worker,
        }
        weights = (2, 6, 1, 2, 3, 1, 1, 5)
        for _ in range(self.rng.randint(3, 25)):
            kind = self.rng.choices(tuple(kinds), weights)[0]
            self.timeline.after(self.rng.uniform(0, 60), lambda k=kind: self._strike(k, kinds[k]))  # type: ignore[misc]

    def _strike(self, kind: str, action: Callable[[], None]) -> None:
        self.num_faults[kind] = self.num_faults.get(kind, 0) + 1
        action()

    def _kill_at_boundary(self) -> None:
        self.control.die_in_boundaries = self.rng.randint(1, 40)

    def _storm(self) -> None:
        """For a while every boundary may be the last, those of the recovery itself included."""
        self.control.death_rate = 0.05
        self.timeline.after(self.rng.uniform(1, 20), self._calm)

    def _calm(self) -> None:
        self.control.death_rate = 0.0

    def _kill_in_request(self) -> None:
        self.machine.die_in_requests = self.rng.randint(1, 20)

    def _kill_zygote(self) -> None:
        self.machine.zygote_up = False
        self.timeline.after(self.rng.uniform(0.1, 2.0), self.machine.start_zygote)

    def _kill_supervisor(self) -> None:
        """Its guardian starts it again; until then nothing else comes back."""
        self._supervisor_back_s = self.timeline.now_s() + self.rng.uniform(0.5, 4.0)

    def _kill_worker(self) -> None:
        alive = self.machine.alive
        if alive:
            worker = self.rng.choice(alive)
            self.killed_workers.add(worker.run)
            self.machine.kill_worker(worker)

    # The end

    def _done(self) -> bool:
        if self._pending or self.core is None or self.machine.alive:
            return False
        return not self.core.state.open_runs and not self.machine.spool

    def _resume_forgotten(self) -> None:
        """A paused run whose user forgot it is resumed in the end, so that it can end."""
        held = [run for run in self.core.state.runs.values() if run.hold] if self.core is not None else []
        for run in held:
            self.control.ask(lambda core, r=run.id: core.resume(r))  # type: ignore[misc]
        if held or self.core is None:
            self.timeline.after(CLIENT_RETRY_S, self._resume_forgotten)

    def _fail_unfinished(self) -> None:
        state = self.core.state if self.core is not None else None
        unfinished = list(state.open_runs) if state is not None else []
        alive = [worker.name for worker in self.machine.alive]
        what = f"runs {unfinished} never end; alive {alive}; clients waiting {self._pending}"
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
        for training in self.machine.trainings.values():
            if training.violations:
                raise Violated("; ".join(training.violations), training.workers[0].run)
        for asked in self.asked:
            self._check_run(asked, core)

    def _check_run(self, asked: Asked, core: Core) -> None:
        run = core.state.runs[core.state.requests[asked.key]]
        starts = {worker.attempt for worker in self.machine.workers.values() if worker.run == run.id and worker.pid}
        if asked.spec.command and len(starts) > 1 + asked.spec.retries:
            raise Violated(f"{run.id} was tried {len(starts)} times with {asked.spec.retries} retries", run.id)
        if run.status == "stopped" and not asked.touched:
            raise Violated(f"{run.id} is stopped, and nobody asked for it", run.id)
        if run.id not in self.killed_workers and run.status != "stopped":
            exits_0 = asked.spec.train or asked.spec.command[2] == "0"
            hangs = asked.spec.config.get("hang_at", -1) >= 0
            expected = "succeeded" if exits_0 else "failed"
            if run.status != expected and not hangs:
                raise Violated(f"{run.id} was left alone and is {run.status}, not {expected}", run.id)
        if run.status == "succeeded" and asked.spec.train:
            training = self.machine.trainings[run.id]
            if training.step != training.until:
                raise Violated(f"{run.id} succeeded at step {training.step} of {training.until}", run.id)
