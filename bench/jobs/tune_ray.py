"""Trials that do nothing under Ray Tune: `python tune_ray.py FOLDER`, a driver with a running Ray of two CPUs and
everything imported. For each line on stdin, a number of trials, it tunes and says how many seconds `fit()` took.

As Ray's guides advise for many short trials: reused actors, no more trials at a time than CPUs, no checkpoints, no
output, ASHA as the scheduler.
"""

import os
import sys
import time

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler


def train(config: dict[str, float]) -> None:
    tune.report({"loss": config["x"]})


def fit(trials: int, folder: str) -> float:
    tuner = tune.Tuner(
        train,
        param_space={"x": tune.uniform(0.0, 1.0)},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=trials,
            max_concurrent_trials=2,
            reuse_actors=True,
            scheduler=ASHAScheduler(max_t=1),
        ),
        run_config=tune.RunConfig(storage_path=folder, verbose=0),
    )
    began_s = time.monotonic()
    results = tuner.fit()
    took_s = time.monotonic() - began_s
    assert len(results) == trials and not results.errors, results.errors
    return took_s


def main(folder: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever Ray prints goes to stderr: stdout carries answers only
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=f"{folder}/ray")
    print("ready", file=answers)
    for line in sys.stdin:
        print(fit(int(line), f"{folder}/storage"), file=answers)
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
