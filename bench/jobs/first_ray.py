"""The same under Ray Tune, on a running Ray: `python first_ray.py ADDRESS FOLDER`."""

import os
import sys
import time
from typing import Any

ANSWERS = os.dup(1)  # a number: what the callback holds is pickled with it
os.dup2(2, 1)
began_s = time.monotonic()

import ray  # noqa: E402
from ray import tune  # noqa: E402


class First(tune.Callback):
    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        os.write(ANSWERS, f"{time.monotonic() - began_s}\n".encode())


def train(config: dict[str, float]) -> None:
    tune.report({"loss": config["x"]})


ray.init(address=sys.argv[1], log_to_driver=False)
tuner = tune.Tuner(
    train,
    param_space={"x": tune.uniform(0.0, 1.0)},
    tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=1, reuse_actors=True),
    run_config=tune.RunConfig(storage_path=sys.argv[2], verbose=0, callbacks=[First()]),
)
tuner.fit()
