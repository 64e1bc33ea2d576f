"""Trials as their workers run them, reduced to what the control plane can see: slices in, results out.

The objective is a curve that follows from the point alone, so every decision about it can be told in advance. What a
trial saved lies on its node's disk and survives its worker.
"""

import random
from collections.abc import Callable

from racimo.agent.protocol import RunSlice
from racimo.sim.timeline import Timeline, Timer
from racimo.sim.worker import SimWorker
from racimo.state.trials import Result, SliceOutcome, Values

Tell = Callable[[SimWorker, int, Result], None]


class SimTrials:
    """The trials of one node. `tell` spools a result; `leave` ends a worker that was asked to go."""

    def __init__(self, timeline: Timeline, rng: random.Random, tell: Tell, leave: Callable[[SimWorker], None]) -> None:
        self._timeline, self._rng, self._tell, self._leave = timeline, rng, tell, leave
        self.saved: dict[tuple[str, int], int] = {}
        """Rounds that are saved here, by run and trial."""
        self._given: dict[str, RunSlice] = {}
        self._done: dict[str, int] = {}
        self._rounds: dict[str, int] = {}
        self._curve: dict[str, list[tuple[int, float]]] = {}
        self._timer: dict[str, Timer] = {}

    def give(self, worker: SimWorker, message: RunSlice) -> None:
        """The same slice again, or one that is over, changes nothing."""
        number = message.order.grant.number
        known = self._given.get(worker.name)
        if not worker.alive or number <= max(self._done.get(worker.name, -1), _number(known)):
            return
        before = known.order.grant.trial if known is not None else None
        self._given[worker.name] = message
        if before != message.order.grant.trial:
            self._rounds[worker.name] = self.saved.get((worker.run, message.order.grant.trial), 0)
        self._curve[worker.name] = []
        self._next_round(worker)

    def asked_to_leave(self, worker: SimWorker) -> None:
        """It leaves after the round at hand, at once if it has none."""
        if worker.name not in self._timer:
            self._leave(worker)

    def ended(self, worker: SimWorker) -> None:
        timer = self._timer.pop(worker.name, None)
        if timer is not None:
            timer.cancel()

    def _next_round(self, worker: SimWorker) -> None:
        round_s = float(worker.order.config["round_s"]) * self._rng.uniform(0.5, 1.5)
        self._timer[worker.name] = self._timeline.after(round_s, lambda: self._after_round(worker))

    def _after_round(self, worker: SimWorker) -> None:
        self._timer.pop(worker.name, None)
        if not worker.alive:
            return
        order = self._given[worker.name].order
        rounds = self._rounds[worker.name] = self._rounds[worker.name] + 1
        value = objective(order.values, rounds)
        if value is None:
            self._end(worker, "diverged")
            return
        self._curve[worker.name].append((rounds, value))
        self.saved[worker.run, order.grant.trial] = rounds
        most = int(worker.order.config["rounds"])
        if rounds >= most:
            self._end(worker, "finished")
        elif order.grant.until and rounds >= order.grant.until:
            self._end(worker, "reached")
        elif worker.asked:
            self._end(worker, "halted")
        else:
            self._next_round(worker)

    def _end(self, worker: SimWorker, outcome: SliceOutcome) -> None:
        grant, rounds = self._given[worker.name].order.grant, self._rounds[worker.name]
        curve = tuple(self._curve[worker.name])
        result = Result(
            outcome=outcome,
            rounds=rounds,
            step=rounds,
            metrics={"loss": curve[-1][1]} if curve else {},
            curve=curve,
            saved=self.saved.get((worker.run, grant.trial), 0),
            worked_s=1.0,
        )
        self._done[worker.name] = grant.number
        self._tell(worker, grant.number, result)
        if worker.asked:
            self._leave(worker)


def objective(values: Values, rounds: int) -> float | None:
    """Falls with the rounds towards the point's distance from 0.3; None where the point is one that diverges."""
    x = values["x"]
    assert isinstance(x, float)
    if x > 0.9 and rounds >= 2:
        return None
    return abs(x - 0.3) + 1.0 / rounds


def _number(message: RunSlice | None) -> int:
    return message.order.grant.number if message is not None else -1
