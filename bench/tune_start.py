"""[tune-start] In a fresh process, from the import to the first trial's result, on a cluster that is warm."""

import subprocess
import sys
import time
from pathlib import Path

from bench.cluster import Cluster
from bench.harness import Deadline, Goal, Row, alternate, quick, ratios, row
from bench.peers import RAY_VENV, RayCluster, clean_environment, copy_jobs, require_peers, scratch
from bench.tune_peers import tune_python

LIMIT_S = 120.0


def run() -> list[Row]:
    require_peers()
    python, deadline = tune_python(), Deadline()
    with scratch("first") as folder:
        code = copy_jobs(folder)
        with Cluster(folder, slots=2) as cluster:
            ray = RayCluster(folder, code, cpus=2)
            try:

                def ours() -> float:
                    return told_s([sys.executable, code / "first_racimo.py", code], cluster.environment)

                def ray_tune() -> float:
                    return told_s([RAY_VENV / "bin" / "python", code / "first_ray.py", ray.address, folder / "tuned"])

                def optuna() -> float:
                    return told_s([python, code / "first_optuna.py", folder / f"{time.monotonic_ns()}.log"])

                def syne() -> float:
                    return told_s([python, code / "first_syne.py", folder / "syne"])

                cases = {"racimo": ours, "ray": ray_tune, "optuna": optuna, "syne": syne}
                for warm in cases.values():
                    warm()
                measured = alternate(cases, 2 if quick() else 9, deadline)
            finally:
                ray.end()
    peers = {
        "Ray Tune, on a running Ray": measured["ray"],
        "Syne Tune, local processes": measured["syne"],
        "Optuna, in the same process, no cluster": measured["optuna"],
    }
    return [
        row("import to the first trial's result, p50", measured["racimo"], "s", Goal("<=", 1.0), peers=peers),
        row("times faster than Ray Tune", ratios(measured["ray"], measured["racimo"]), "x"),
        row("times faster than Optuna without a cluster", ratios(measured["optuna"], measured["racimo"]), "x"),
    ]


def told_s(words: list[object], environment: dict[str, str] | None = None) -> float:
    """The seconds that a script says."""
    done = subprocess.run(
        [str(word) for word in words],
        env=environment or clean_environment(RAY_USAGE_STATS_ENABLED="0"),
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
        cwd=Path(str(words[1])).parent,
    )
    if done.returncode:
        raise RuntimeError(f"{words[1]} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return float(done.stdout.split()[0])
