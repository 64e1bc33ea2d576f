"""The simulated clock: W workers train, one round after the other, what a system tells them to."""

import heapq
import math
from typing import NamedTuple, Protocol

import msgspec

from bench.tables.objectives import Curve, Objective, Values, regret

TARGET_REGRET = 0.01
MAX_ROUNDS = 2_000_000
"""Of one run, whatever its horizon: a system that goes round in circles is an error, not a wait."""


class Move(NamedTuple):
    """A worker begins with a trial, or goes on with it after `done` rounds."""

    worker: int
    trial: int
    values: Values
    done: int


class System(Protocol):
    """Something that tunes. `loss` is less for better, NaN as it came."""

    def moves(self, idle: list[int]) -> list[Move]:
        """What idle workers do next; nothing for those that are to wait."""

    def report(self, worker: int, trial: int, rounds: int, loss: float, seconds: float) -> bool:
        """A round is over, which took so long; whether the worker goes on with this trial at once. After the last
        round: False."""


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `target_s`: when the target was reached, None if it was not until `end_s`."""

    target_s: float | None
    end_s: float
    regret: float
    trials: int
    rounds: int
    diverged_rounds: int
    """Of trials that reported NaN, before and after."""
    idle_s: float
    """Worker-seconds without a trial."""


class Limits(NamedTuple):
    horizon_s: float
    rounds: int = MAX_ROUNDS
    target: float = TARGET_REGRET


class Clock:
    def __init__(self, system: System, objective: Objective, workers: int, limits: Limits) -> None:
        self._system, self._objective, self._limits = system, objective, limits
        self._workers = workers
        self._idle = list(range(workers))
        self._doing: dict[int, tuple[int, int, Curve]] = {}
        """By worker: trial, rounds done, its curve."""
        self._ends: list[tuple[float, int, int]] = []
        """When rounds end: (second, order, worker)."""
        self._order = 0
        self._now_s = 0.0
        self._idle_since_s = [0.0] * workers
        self._idle_s = 0.0
        self._rounds_of: dict[int, int] = {}
        self._diverged: set[int] = set()

    def play(self) -> Played:
        """Until the target, the horizon, or until nothing is to be done any more."""
        best, rounds, target_s = math.inf, 0, None
        self._begin()
        while self._ends and rounds < self._limits.rounds:
            self._now_s, _, worker = heapq.heappop(self._ends)
            if self._now_s > self._limits.horizon_s:
                self._now_s = self._limits.horizon_s
                break
            trial, done, curve = self._doing[worker]
            done, loss = done + 1, curve.values[done]
            rounds += 1
            self._rounds_of[trial] = self._rounds_of.get(trial, 0) + 1
            if math.isnan(loss):
                self._diverged.add(trial)
            best = loss if loss < best else best
            if regret(self._objective, best) <= self._limits.target:
                target_s = self._now_s
                break
            self._after_round(worker, trial, done, curve, loss)
        return Played(
            target_s=target_s,
            end_s=self._now_s,
            regret=regret(self._objective, best),
            trials=len(self._rounds_of),
            rounds=rounds,
            diverged_rounds=sum(self._rounds_of[trial] for trial in self._diverged),
            idle_s=self._idle_s,
        )

    def _after_round(self, worker: int, trial: int, done: int, curve: Curve, loss: float) -> None:
        goes_on = self._system.report(worker, trial, done, loss, curve.seconds[done - 1])
        if goes_on:
            assert done < self._objective.rounds, f"trial {trial} has had all its {done} rounds"
            self._doing[worker] = (trial, done, curve)
            self._train(worker)
        else:
            del self._doing[worker]
            self._idle.append(worker)
            self._idle_since_s[worker] = self._now_s
        if self._idle:
            self._begin()

    def _begin(self) -> None:
        for move in self._system.moves(list(self._idle)):
            self._idle.remove(move.worker)
            self._idle_s += self._now_s - self._idle_since_s[move.worker]
            self._doing[move.worker] = (move.trial, move.done, self._objective.curve(move.values))
            self._train(move.worker)

    def _train(self, worker: int) -> None:
        _, done, curve = self._doing[worker]
        self._order += 1
        heapq.heappush(self._ends, (self._now_s + curve.seconds[done], self._order, worker))


def play(system: System, objective: Objective, workers: int, limits: Limits) -> Played:
    return Clock(system, objective, workers, limits).play()
