"""Ray Tune 2.60's scheduler and search objects, told what its controller tells them, without a Ray behind: ASHA with
random points, or with `OptunaSearch`. ASHA there stops trials; it never pauses one.
"""

import random
from typing import Any

import optuna
from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler
from ray.tune.search.optuna import OptunaSearch

from bench.tables.clock import Move
from bench.tables.objectives import Objective, Values

ETA = 3


class _Trial:
    """What the scheduler reads of a trial."""

    def __init__(self, number: int, config: Values) -> None:
        self.trial_id, self.config = str(number), config


class Ray:
    def __init__(self, objective: Objective, seed: int, searcher: str) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._objective = objective
        self._asha = AsyncHyperBandScheduler(
            time_attr="training_iteration",
            metric="loss",
            mode="min",
            max_t=objective.rounds,
            grace_period=1,
            reduction_factor=ETA,
        )
        self._random = random.Random(seed)
        self._search: OptunaSearch | None = None
        if searcher == "optuna":
            self._search = OptunaSearch(space=_distributions(objective), metric="loss", mode="min", seed=seed)
        self._trials: dict[int, _Trial] = {}
        self._count = 0

    def moves(self, idle: list[int]) -> list[Move]:
        found = []
        for worker in idle:
            number, self._count = self._count, self._count + 1
            config = self._search.suggest(str(number)) if self._search is not None else self._draw()
            self._trials[number] = _Trial(number, config)
            self._asha.on_trial_add(None, self._trials[number])  # type: ignore[arg-type]
            found.append(Move(worker, number, config, 0))
        return found

    def _draw(self) -> Values:
        return {one.name: one.at(self._random.random()) for one in self._objective.space}

    def report(self, worker: int, trial: int, rounds: int, loss: float, seconds: float) -> bool:
        result: dict[str, Any] = {"training_iteration": rounds, "loss": loss}
        told = self._trials[trial]
        decision = self._asha.on_trial_result(None, told, result)  # type: ignore[arg-type]
        if decision == TrialScheduler.CONTINUE:
            if self._search is not None:
                self._search.on_trial_result(str(trial), result)
            return True
        self._asha.on_trial_complete(None, told, result)  # type: ignore[arg-type]
        if self._search is not None:
            self._search.on_trial_complete(str(trial), result)
        del self._trials[trial]
        return False


def _distributions(objective: Objective) -> dict[str, Any]:
    return {
        one.name: optuna.distributions.IntDistribution(int(one.low), int(one.high), log=one.log)
        if one.kind == "int"
        else optuna.distributions.FloatDistribution(one.low, one.high, log=one.log)
        for one in objective.space
    }
