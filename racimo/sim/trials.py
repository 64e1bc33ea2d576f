"""Trials as their workers run them, reduced to what the control plane can see: slices in, results out.

The objective is a curve that follows from the point alone, so every decision about it can be told in advance. What a
trial saved lies on its node's disk, survives its worker, and is fetched from there by others. `Truth` remembers what
really happened, to be held against the journal.
"""

import random
from collections.abc import Callable

from racimo.agent.protocol import RunSlice, SliceOrder
from racimo.sim.timeline import Timeline, Timer
from racimo.sim.worker import SimWorker
from racimo.state.trials import Result, SliceOutcome, Values

Tell = Callable[[SimWorker, int, Result], None]


class Truth:
    """What trials really did, over all nodes and attempts. `counts`: whether control takes a worker to be alive."""

    def __init__(self, counts: Callable[[SimWorker], bool]) -> None:
        self.results: dict[tuple[str, int], tuple[SimWorker, Result]] = {}
        """By run and number of the slice."""
        self.violations: list[tuple[str, str]] = []
        """(run, what happened)"""
        self.num_begun_again = 0
        self._counts = counts
        self._done: dict[tuple[str, int], int] = {}

    def begins(self, worker: SimWorker, trial: int, rounds: int, *, may_be_late: bool) -> None:
        """A worker takes up a trial after so many rounds. `may_be_late`: what was saved may have burnt."""
        done = self._done.get((worker.run, trial), 0)
        self.num_begun_again += rounds < done
        if done - rounds > 1 and not may_be_late:
            self.violations.append((worker.run, f"{worker.name} begins trial {trial} at {rounds}, {done} were done"))

    def round_done(self, worker: SimWorker, trial: int, rounds: int) -> None:
        if self._counts(worker):
            key = worker.run, trial
            self._done[key] = max(self._done.get(key, 0), rounds)

    def ended(self, worker: SimWorker, number: int, result: Result) -> None:
        if (worker.run, number) in self.results:
            self.violations.append((worker.run, f"slice {number} was run twice"))
        self.results[worker.run, number] = worker, result


class SimTrials:
    """The trials of one node. `tell` spools a result; `leave` ends a worker that was asked to go.

    `saved_at` (node, run, trial): the rounds that are saved on a node, None if it has burnt."""

    def __init__(
        self,
        timeline: Timeline,
        rng: random.Random,
        tell: Tell,
        leave: Callable[[SimWorker], None],
        saved_at: Callable[[str, str, int], int | None],
        truth: Truth,
    ) -> None:
        self._timeline, self._rng, self._tell, self._leave = timeline, rng, tell, leave
        self._saved_at, self._truth = saved_at, truth
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
            self._rounds[worker.name] = self._take_up(worker, message.order)
        self._curve[worker.name] = []
        self._next_round(worker)

    def _take_up(self, worker: SimWorker, order: SliceOrder) -> int:
        """The rounds of the newest state that can be had: its own, else its parent's."""
        run, trial = worker.run, order.grant.trial
        own: list[int | None] = [self.saved.get((run, trial), 0)]
        own += [self._saved_at(place.node, run, trial) for place in order.states if place.trial == trial]
        others = [self._saved_at(place.node, run, place.trial) for place in order.states if place.trial != trial]
        rounds = max(known for known in own if known is not None)
        self._truth.begins(worker, trial, rounds, may_be_late=None in own)
        rounds = rounds or max((known for known in others if known is not None), default=0)
        self.saved[run, trial] = rounds
        return rounds

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
        self._truth.round_done(worker, order.grant.trial, rounds)
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
        self._truth.ended(worker, grant.number, result)
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
