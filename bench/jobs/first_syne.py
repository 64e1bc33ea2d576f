"""The same with Syne Tune, on this machine: `python first_syne.py FOLDER`."""

import os
import sys
import time

answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
os.environ["SYNETUNE_FOLDER"] = sys.argv[1]
began_s = time.monotonic()

from syne_tune import StoppingCriterion, Tuner  # noqa: E402
from syne_tune.backend import PythonBackend  # noqa: E402
from syne_tune.config_space import uniform  # noqa: E402
from syne_tune.optimizer.baselines import RandomSearch  # noqa: E402
from syne_tune.tuner_callback import TunerCallback  # noqa: E402


class First(TunerCallback):
    def on_trial_result(self, trial, status, result, decision) -> None:  # type: ignore[no-untyped-def]
        answers.write(f"{time.monotonic() - began_s}\n")
        answers.flush()


def train(x: float) -> None:
    from syne_tune import Reporter

    Reporter()(loss=x)


CONFIG = {"x": uniform(0.0, 1.0)}
Tuner(
    trial_backend=PythonBackend(tune_function=train, config_space=CONFIG),
    scheduler=RandomSearch(CONFIG, metrics=["loss"]),
    stop_criterion=StoppingCriterion(max_num_trials_finished=1),
    n_workers=1,
    sleep_time=0.05,
    callbacks=[First()],
).run()
