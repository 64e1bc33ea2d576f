"""[start] From nothing to a cluster, and from submit to a command's first line."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from bench.cluster import COMMAND_LIMIT_S, Cluster, racimo_path
from bench.harness import Deadline, Goal, Row, alternate, quick, row
from bench.peers import RAY_VENV, RayCluster, clean_environment, copy_jobs, require_peers, scratch
from racimo.spec.run import RunSpec

ECHO = RunSpec(command=("echo", "hi"), files="")
ECHO_IN_RAY = """
import subprocess, sys, time
import ray
ray.init(address=sys.argv[1], log_to_driver=False)

@ray.remote
def echo():
    return subprocess.run(["echo", "hi"], capture_output=True, text=True).stdout

for _ in range(int(sys.argv[2])):
    start = time.monotonic()
    assert ray.get(echo.remote()) == "hi\\n"
    print(time.monotonic() - start)
"""


def run() -> list[Row]:
    require_peers()
    deadline = Deadline()
    with scratch("start") as folder:
        up = alternate({"up": lambda: time_up(folder, take_run=False)}, 2 if quick() else 7, deadline)["up"]
        taking = [time_up(folder, take_run=True) for _ in range(1 if quick() else 5)]
        code = copy_jobs(folder)
        with Cluster(folder, slots=2) as cluster:
            ray = RayCluster(folder, code, cpus=2)
            try:
                cases = {
                    "submit": lambda: time_submit(cluster),
                    "command": lambda: time_command([racimo_path(), "run", "--no-files", "--", "echo", "hi"], cluster),
                }
                ours = alternate(cases, 5 if quick() else 40, deadline.share(0.5))
                script = [str(RAY_VENV / "bin" / "python"), "-c", ECHO_IN_RAY, ray.address]
                tasks = [float(line) for line in output_of([*script, "20"]).split()]
                scripts = alternate({"script": lambda: timed(lambda: output_of([*script, "1"]))}, 3, deadline)["script"]
                ray_up_s = ray.up_s
            finally:
                ray.end()
    return [
        row(
            "SDK submit of `echo hi` to its first line, p50",
            [1000 * value for value in ours["submit"]],
            "ms",
            Goal("<=", 150),
            peers={"ray task in a connected driver, reused worker": [1000 * value for value in tasks]},
            note="a Ray task is a function call in a process kept for it: no process, log, exit code or record",
        ),
        row(
            "whole command `racimo run -- echo hi`, p50",
            [1000 * value for value in ours["command"]],
            "ms",
            Goal("<=", 600),
            peers={"python script: ray.init, one task": [1000 * value for value in scripts]},
        ),
        row("`racimo up` from nothing until it returns", up, "s", Goal("<=", 2), peers={"ray start --head": ray_up_s}),
        row("`racimo up` and the first line of a first `echo hi`", taking, "s", Goal("<=", 2)),
    ]


def time_up(folder: Path, *, take_run: bool) -> float:
    with scratch("up") as home_folder:
        cluster = Cluster(home_folder, slots=2)
        start_s = time.monotonic()
        with cluster:
            if take_run:
                first_line(cluster)
            return time.monotonic() - start_s


def first_line(cluster: Cluster) -> None:
    view = cluster.client.submit(ECHO)
    line = next(cluster.client.logs(view.id, follow=True))
    assert line.text.strip() == "hi", line


def time_submit(cluster: Cluster) -> float:
    return timed(lambda: first_line(cluster))


def time_command(words: list[str], cluster: Cluster) -> float:
    def call() -> None:
        done = subprocess.run(words, env=cluster.environment, text=True, capture_output=True, timeout=COMMAND_LIMIT_S)
        assert done.returncode == 0 and done.stdout == "hi\n", done

    return timed(call)


def output_of(words: list[str]) -> str:
    return subprocess.run(
        words, env=clean_environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    ).stdout


def timed(call: Callable[[], object]) -> float:
    start_s = time.monotonic()
    call()
    return time.monotonic() - start_s
