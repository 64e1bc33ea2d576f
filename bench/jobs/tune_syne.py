"""Trials that do nothing under Syne Tune: `python tune_syne.py FOLDER`, with its local backend (a process for each
trial) and two workers. For each line on stdin, a number of trials, it tunes and says how many seconds `run()` took.
"""

import logging
import os
import sys
import time

from syne_tune import StoppingCriterion, Tuner
from syne_tune.backend import PythonBackend
from syne_tune.config_space import uniform
from syne_tune.optimizer.baselines import RandomSearch

CONFIG = {"x": uniform(0.0, 1.0)}


def train(x: float) -> None:
    from syne_tune import Reporter

    Reporter()(loss=x)


def fit(trials: int) -> float:
    tuner = Tuner(
        trial_backend=PythonBackend(tune_function=train, config_space=CONFIG),
        scheduler=RandomSearch(CONFIG, metrics=["loss"]),
        stop_criterion=StoppingCriterion(max_num_trials_finished=trials),
        n_workers=2,
        sleep_time=0.1,
    )
    began_s = time.monotonic()
    tuner.run()
    return time.monotonic() - began_s


def main(folder: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    logging.getLogger().setLevel(logging.ERROR)
    os.environ["SYNETUNE_FOLDER"] = folder
    print("ready", file=answers)
    for line in sys.stdin:
        print(fit(int(line)), file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
