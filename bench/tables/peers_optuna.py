"""Optuna 5 by `ask` and `tell`, as its pages on TPE, pruners and ask-and-tell advise: a multivariate TPE with the
constant liar for parallel workers, and Hyperband or successive halving as the pruner. It cannot pause a trial.
"""

import optuna

from bench.tables.clock import Move
from bench.tables.objectives import Objective, Values

ETA = 3


class Optuna:
    def __init__(self, objective: Objective, seed: int, pruner: str) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        pruners: dict[str, optuna.pruners.BasePruner] = {
            "hyperband": optuna.pruners.HyperbandPruner(
                min_resource=1, max_resource=objective.rounds, reduction_factor=ETA
            ),
            "asha": optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=ETA),
        }
        sampler = optuna.samplers.TPESampler(multivariate=True, constant_liar=True, seed=seed)
        self._study = optuna.create_study(sampler=sampler, pruner=pruners[pruner])
        self._objective = objective
        self._trials: dict[int, optuna.Trial] = {}

    def moves(self, idle: list[int]) -> list[Move]:
        found = []
        for worker in idle:
            trial = self._study.ask()
            self._trials[trial.number] = trial
            found.append(Move(worker, trial.number, self._suggest(trial), 0))
        return found

    def _suggest(self, trial: optuna.Trial) -> Values:
        return {
            one.name: trial.suggest_int(one.name, int(one.low), int(one.high), log=one.log)
            if one.kind == "int"
            else trial.suggest_float(one.name, one.low, one.high, log=one.log)
            for one in self._objective.space
        }

    def report(self, worker: int, trial: int, rounds: int, loss: float, seconds: float) -> bool:
        asked = self._trials[trial]
        asked.report(loss, step=rounds)
        if rounds >= self._objective.rounds:
            self._study.tell(asked, loss)
        elif asked.should_prune():
            self._study.tell(asked, state=optuna.trial.TrialState.PRUNED)
        else:
            return True
        del self._trials[trial]
        return False
