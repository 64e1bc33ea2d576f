"""Syne Tune 0.16's schedulers, told what its tuner tells them: ASHA with random points, with BORE, with conformalized
quantile regression, and BOHB. This version has no MOBSTER and no Hyper-Tune any more, and its ASHA stops trials and
never pauses one.

NaN, which its models refuse, is told as the greatest loss that any trial has reported so far.
"""

import datetime
import logging
import math
from typing import Any

from syne_tune.backend.trial_status import Trial
from syne_tune.config_space import lograndint, loguniform, randint, uniform
from syne_tune.optimizer.baselines import ASHA, ASHABORE, ASHACQR, BOHB
from syne_tune.optimizer.scheduler import SchedulerDecision

from bench.tables.clock import Move
from bench.tables.objectives import Objective

ETA = 3
_BEGAN = datetime.datetime(2026, 1, 1)
_SCHEDULERS: dict[str, Any] = {"asha": ASHA, "bore": ASHABORE, "cqr": ASHACQR, "bohb": BOHB}


class SyneTune:
    def __init__(self, objective: Objective, seed: int, how: str) -> None:
        logging.getLogger("syne_tune").setLevel(logging.ERROR)
        self._objective = objective
        self._scheduler = _SCHEDULERS[how](
            config_space=_space(objective),
            metric="loss",
            time_attr="epoch",
            max_t=objective.rounds,
            do_minimize=True,
            random_seed=seed,
            grace_period=1,
            reduction_factor=ETA,
        )
        self._trials: dict[int, Trial] = {}
        self._count = 0
        self._greatest = -math.inf

    def moves(self, idle: list[int]) -> list[Move]:
        found = []
        for worker in idle:
            suggestion = self._scheduler.suggest()
            assert suggestion is not None and suggestion.spawn_new_trial_id
            number, self._count = self._count, self._count + 1
            self._trials[number] = Trial(trial_id=number, config=suggestion.config, creation_time=_BEGAN)
            self._scheduler.on_trial_add(self._trials[number])
            found.append(Move(worker, number, suggestion.config, 0))
        return found

    def report(self, worker: int, trial: int, rounds: int, loss: float, seconds: float) -> bool:
        if math.isfinite(loss):
            self._greatest = max(self._greatest, loss)
        elif math.isfinite(self._greatest):
            loss = self._greatest
        else:
            loss = self._objective.worst
        decision = self._scheduler.on_trial_result(self._trials[trial], {"loss": loss, "epoch": rounds})
        if decision == SchedulerDecision.CONTINUE:
            return True
        assert decision == SchedulerDecision.STOP, decision
        del self._trials[trial]
        return False


def _space(objective: Objective) -> dict[str, Any]:
    found = {}
    for one in objective.space:
        if one.kind == "int":
            found[one.name] = (lograndint if one.log else randint)(int(one.low), int(one.high))
        else:
            found[one.name] = (loguniform if one.log else uniform)(one.low, one.high)
    return found
