"""One limited study on a virtual clock: its workers start late, are slow, hang and die, and the control process is away
for minutes, while an agent knows only what it was told. What was really spent is counted beside the core's account.

The real `Core` decides; that it and the budget agree is what this is for.
"""

import heapq
import random
from collections.abc import Callable

import msgspec

from racimo.act.journal import MemoryDisk, MemoryJournal
from racimo.agent.prepaid import HARD_STOP_S
from racimo.agent.protocol import AgentEvent, SliceOrder, WorkerState
from racimo.control.core import Core
from racimo.control.effects import Effect, Slice, Start, Stop
from racimo.decide.tune.forecast import ENOUGH_TRIALS, Spent, forecast
from racimo.sim.checks import Violated
from racimo.spec.run import RunSpec
from racimo.spec.study import StudySpec
from racimo.state import events as ev
from racimo.state.nouns import Device, Exit, Node, Outcome, parse_worker_id
from racimo.state.trials import Result, SliceOutcome

MAX_EVENTS = 200_000
SECONDS_PER_HOUR = 3600.0


class Odds(msgspec.Struct, frozen=True, kw_only=True):
    """How one study's world behaves: seconds; chances of each slice (`hangs`), round (`dies`) and event (`away`)."""

    start_s: float = 1.0
    round_s: float = 2.0
    hangs: float = 0.0
    dies: float = 0.0
    away: float = 0.0
    away_s: float = 0.0


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it: really spent, as the core counts it, and the seconds from the first start to the last end."""

    spent: float
    counted: float
    took_s: float
    code: str
    num_trials: int
    forecast: float | None = None
    """Of the money, made once ten trials were in."""


class _Lane:
    """One worker and what its agent knows of it."""

    def __init__(self, name: str, accepted_s: float, paid_s: float) -> None:
        self.name, self.accepted_s, self.paid_s = name, accepted_s, paid_s
        self.alive, self.ready, self.leaving = True, False, ""
        self.order: SliceOrder | None = None
        self.done = -1
        self.rounds = 0
        self.slice_began_s = 0.0
        self.ended: Exit | None = None
        self.told = False


class StudyPlay:
    """`run()` plays it to its end; `Violated` if the budget or the time is exceeded, or it never ends."""

    def __init__(self, seed: int, terms: StudySpec, odds: Odds, *, devices: int = 4, price: float = 36.0) -> None:
        self.seed, self.terms, self.odds, self.price = seed, terms, odds, price
        self.rng = random.Random(seed)
        self.now, self._number = 1_000.0, 0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.disk = MemoryDisk()
        self.node = Node(
            id="n", host="n", devices=tuple(Device(i) for i in range(devices)), price_per_device_hour=price
        )
        self.lanes: dict[str, _Lane] = {}
        self.saved: dict[int, int] = {}
        self.spool: list[AgentEvent] = []
        self.core: Core | None = None
        self.run_id = ""
        self.first_s: float | None = None
        self._forecast: float | None = None
        self._due_s: float | None = None

    # Its clock, as the core's

    def now_s(self) -> float:
        return self.now

    def wall_s(self) -> float:
        return self.now

    def run(self) -> Ended:
        self._control_starts()
        assert self.core is not None
        spec = RunSpec(tune="t.py:f", study=self.terms, seed=self.seed)
        self.run_id = self.core.submit(spec, "request").id
        self._turn()
        for _ in range(MAX_EVENTS):
            if not self.heap:
                break
            self.now, _, action = heapq.heappop(self.heap)
            action()
        return self._look()

    # The control process

    def _control_starts(self) -> None:
        self.core = Core(MemoryJournal(self.disk), self)
        self.core.come_up()
        self.core.node_joined(self.node)
        untold = [lane for lane in self.lanes.values() if not lane.told]
        states = [WorkerState(worker=lane.name, pid=1, exited=lane.ended is not None) for lane in untold]
        self.core.resync("n", states)
        self._due_s = None
        self._turn()

    def _control_dies(self) -> None:
        self.core = None
        self._after(self.rng.uniform(0, self.odds.away_s), self._control_starts)

    def _turn(self) -> None:
        if self.core is None:
            return
        for event in self.spool:
            self.core.agent_event(event)
            if isinstance(event, ev.WorkerExited):
                self.lanes[f"{event.run}/{event.attempt}/{event.index}"].told = True
        self.spool.clear()
        self.core.tick()
        self.core.commit()
        self._check_promises(self.core)
        self._look_ahead(self.core)
        for effect in self.core.take_effects():
            self._after(self.rng.uniform(0, 0.2), lambda e=effect: self._take(e))  # type: ignore[misc]
        due_s = self.core.next_due_s
        if due_s is not None and due_s != self._due_s:
            self._due_s = due_s
            self._after(max(0.0, due_s - self.now), self._turn)
        if self.run_id and not self.core.state.runs[self.run_id].ended and self.rng.random() < self.odds.away:
            self._control_dies()

    def _check_promises(self, core: Core) -> None:
        run = core.state.runs.get(self.run_id)
        money = self.terms.money
        if run is None or money is None:
            return
        rate = self.price / SECONDS_PER_HOUR
        promised = run.cost + sum(worker.paid_s * rate for worker in run.live_workers)
        if promised > money + 1e-9:
            raise Violated(f"seed {self.seed}: {promised} of {money} are spent or promised", self.run_id)
        if any(not worker.paid_s for worker in run.live_workers):
            raise Violated(f"seed {self.seed}: a worker lives without being paid for", self.run_id)

    def _look_ahead(self, core: Core) -> None:
        study, run = core.state.studies.get(self.run_id), core.state.runs.get(self.run_id)
        if self._forecast is not None or study is None or run is None or run.ended:
            return
        if sum(trial.rounds > 0 for trial in study.trials) < ENOUGH_TRIALS:
            return
        ages = sum(max(0.0, self.now - worker.started_at_s) for worker in run.live_workers)
        workers = run.workers.values()
        starting_s = sum((w.ready_at_s or w.exited_at_s or self.now) - w.started_at_s for w in workers)
        spent = Spent(run.device_s + ages, run.cost + ages * self.price / SECONDS_PER_HOUR, starting_s)
        told = forecast(
            study, self.now, num_workers=max(1, len(run.live_workers)), price_per_device_hour=self.price,
            active_s=run.active_until(self.now), leased=spent,
        )  # fmt: skip
        self._forecast = told.cost if told is not None else None

    # The agent

    def _take(self, effect: Effect) -> None:
        match effect:
            case Start():
                placement = effect.placement
                if effect.worker not in self.lanes:
                    self.first_s = self.now if self.first_s is None else self.first_s
                    lane = self.lanes[effect.worker] = _Lane(effect.worker, self.now, placement.paid_s)
                    self._after(self.odds.start_s * self.rng.uniform(0.5, 2.0), lambda: self._ready(lane))
                    self._hard_stop_later(lane)
            case Slice():
                found = self.lanes.get(effect.worker)
                if found is not None and found.alive:
                    self._give(found, effect.order)
            case Stop():
                found = self.lanes.get(effect.worker)
                if found is None:  # its order may still be on its way, and must never run
                    found = self.lanes[effect.worker] = _Lane(effect.worker, self.now, 0.0)
                    self._end(found, "killed")
                if found.alive:
                    self._stop(found, effect.how)
            case _:
                pass

    def _hard_stop_later(self, lane: _Lane) -> None:
        at_s = lane.accepted_s + lane.paid_s - HARD_STOP_S

        def stop() -> None:
            if lane.alive and self.now >= lane.accepted_s + lane.paid_s - HARD_STOP_S - 1e-9:
                self._end(lane, "killed")

        self._after(max(0.0, at_s - self.now), stop)

    def _stop(self, lane: _Lane, how: str) -> None:
        if how == "abort" or not lane.ready:
            self._end(lane, "killed")
        elif not lane.leaving:
            lane.leaving = how
            if lane.order is None:
                self._leave(lane)

    # The worker

    def _ready(self, lane: _Lane) -> None:
        if lane.alive:
            lane.ready = True
            run, attempt, index = parse_worker_id(lane.name)
            self._say(ev.WorkerReady(run=run, attempt=attempt, index=index, address="", micro_shards=9, numerics=""))

    def _give(self, lane: _Lane, order: SliceOrder) -> None:
        if order.grant.paid_s > lane.paid_s:
            lane.paid_s = order.grant.paid_s
            self._hard_stop_later(lane)
        newest = lane.done if lane.order is None else lane.order.grant.number
        if order.grant.number <= newest:
            return
        lane.order, lane.slice_began_s = order, self.now
        lane.rounds = self.saved.get(order.grant.trial, 0)
        if self.rng.random() >= self.odds.hangs:
            self._next_round(lane)

    def _next_round(self, lane: _Lane) -> None:
        length_s = self.odds.round_s * self.rng.uniform(0.5, 1.5)
        self._after(length_s, lambda: self._after_round(lane, length_s))

    def _after_round(self, lane: _Lane, length_s: float) -> None:
        order = lane.order
        if not lane.alive or order is None:
            return
        if self.rng.random() < self.odds.dies:
            self._end(lane, "killed")
            return
        lane.rounds += 1
        self.saved[order.grant.trial] = lane.rounds
        late = order.grant.prepaid_s and self.now - lane.slice_began_s + length_s > order.grant.prepaid_s
        if self.terms.rounds and lane.rounds >= self.terms.rounds:
            self._slice_ends(lane, "finished")
        elif order.grant.until and lane.rounds >= order.grant.until:
            self._slice_ends(lane, "reached")
        elif lane.leaving:
            self._slice_ends(lane, "halted")
        elif late:
            self._slice_ends(lane, "expired")
        else:
            self._next_round(lane)

    def _slice_ends(self, lane: _Lane, outcome: SliceOutcome) -> None:
        order = lane.order
        assert order is not None
        lane.order, lane.done = None, order.grant.number
        value = order.grant.trial % 7 + 1.0 / lane.rounds
        result = Result(
            outcome=outcome, rounds=lane.rounds, step=lane.rounds, metrics={"loss": value},
            curve=((lane.rounds, value),), saved=lane.rounds, worked_s=self.now - lane.slice_began_s,
        )  # fmt: skip
        run, attempt, index = parse_worker_id(lane.name)
        self._say(ev.SliceEnded(run=run, attempt=attempt, index=index, number=order.grant.number, result=result))
        if lane.leaving:
            self._leave(lane)

    def _leave(self, lane: _Lane) -> None:
        outcome: Outcome = "paused" if lane.leaving == "pause" else "released"
        self._after(self.rng.uniform(0, 0.5), lambda: self._end(lane, outcome))

    def _end(self, lane: _Lane, outcome: Outcome) -> None:
        if not lane.alive:
            return
        lane.alive = False
        lane.ended = Exit(outcome=outcome, held_s=self.now - lane.accepted_s)
        run, attempt, index = parse_worker_id(lane.name)
        self._say(ev.WorkerExited(run=run, attempt=attempt, index=index, exit=lane.ended))

    def _say(self, event: AgentEvent) -> None:
        self.spool.append(event)
        self._after(self.rng.uniform(0, 0.05), self._turn)

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self.heap, (self.now + delay_s, self._number, action))

    # The end

    def _look(self) -> Ended:
        assert self.core is not None
        run = self.core.state.runs[self.run_id]
        if not run.ended or any(lane.alive for lane in self.lanes.values()):
            raise Violated(f"seed {self.seed}: it never ends: {run.status}, {run.reason}", self.run_id)
        lives = [lane.ended.held_s for lane in self.lanes.values() if lane.ended is not None]
        spent = sum(lives) * self.price / SECONDS_PER_HOUR
        if self.terms.money is not None and spent > self.terms.money + 1e-9:
            raise Violated(f"seed {self.seed}: {spent} spent of {self.terms.money}", self.run_id)
        ends_s = [lane.accepted_s + lane.ended.held_s for lane in self.lanes.values() if lane.ended is not None]
        return Ended(
            spent=spent,
            counted=run.cost,
            took_s=max(ends_s, default=self.now) - (self.first_s or self.now),
            code=run.reason.code if run.reason is not None else "",
            num_trials=len(self.core.state.studies[self.run_id].trials),
            forecast=self._forecast,
        )


def random_study(seed: int) -> StudyPlay:
    """A study with a budget, a time limit or both, in a world that may be a bad one."""
    rng = random.Random(f"study {seed}")
    limit = rng.choice(("budget", "budget", "budget", "both"))
    terms = StudySpec(
        space={"x": "0.0..1.0"},
        metric="loss",
        proposer="random",
        scheduler=rng.choice(("asha", "asha", "freeze-thaw", "population", "median", "none")),
        trials=rng.choice((5, 30, 1_000)),
        parallel=rng.choice((0, 1, 2, 4)),
        rounds=rng.choice((3, 9, 27)),
        retries=1_000,
        budget=round(rng.uniform(0.02, 6.0), 2),
        time="90s" if limit == "both" else "",
    )
    odds = Odds(
        start_s=rng.choice((0.05, 1.0, 10.0)),
        round_s=rng.choice((0.2, 2.0, 8.0, 40.0)),
        hangs=rng.choice((0.0, 0.0, 0.02)),
        dies=rng.choice((0.0, 0.0, 0.03)),
        away=rng.choice((0.0, 0.0, 0.02)),
        away_s=rng.choice((1.0, 30.0, 1_000.0)),
    )
    return StudyPlay(seed, terms, odds, devices=rng.choice((1, 4, 8)))
