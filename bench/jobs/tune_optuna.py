"""One process of a study in Optuna: `python tune_optuna.py JOURNAL TRIALS SEED`, as its page on parallelization has it
for one machine: a journal file that all processes share.

It says `ready` once everything is imported and the study is open, begins when it reads a line, and says when it began
and ended (CLOCK_MONOTONIC).
"""

import sys
import time

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend


def objective(trial: optuna.Trial) -> float:
    return trial.suggest_float("x", 0.0, 1.0)


def main(journal: str, trials: int, seed: int) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name="noop",
        storage=JournalStorage(JournalFileBackend(journal)),
        sampler=optuna.samplers.RandomSampler(seed=seed),
        load_if_exists=True,
    )
    print("ready", flush=True)
    sys.stdin.readline()
    began_s = time.monotonic()
    study.optimize(objective, n_trials=trials)
    print(began_s, time.monotonic(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
