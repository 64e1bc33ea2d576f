"""[cli] How quickly the command answers, and what an idle cluster costs."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import psutil

from bench.cluster import COMMAND_LIMIT_S, Cluster, memory_by_role, racimo_path
from bench.harness import Deadline, Goal, Row, alternate, quick, row
from bench.peers import RAY_VENV, RayCluster, copy_jobs, require_peers, scratch, torchrun_path

IDLE_S = 30.0
SETTLE_S = 5.0


def run() -> list[Row]:
    require_peers()
    deadline = Deadline()
    idle_s = 5.0 if quick() else IDLE_S
    ray_command = str(RAY_VENV / "bin" / "ray")
    with scratch("cli") as folder:
        code = copy_jobs(folder)
        with Cluster(folder, slots=2) as cluster:
            cluster.command("run", "--no-files", "--", "true")
            time.sleep(SETTLE_S)  # let torch's import in the zygote end: idle is measured, not starting
            idle = cluster.processes()
            cpu = cpu_percent(idle, idle_s)
            memory = memory_by_role(cluster)
            ray = RayCluster(folder, code, cpus=2)
            try:
                ray_cpu = cpu_percent(ray.processes(), idle_s)
                ray_memory_mb = sum(process.memory_info().rss for process in ray.processes()) / 1e6
                cases = {
                    "racimo --help": timed(cluster, [racimo_path(), "--help"]),
                    "racimo ps": timed(cluster, [racimo_path(), "ps"]),
                    "ray --help": timed(cluster, [ray_command, "--help"]),
                    "ray status": timed(cluster, [ray_command, "status", "--address", ray.address]),
                    "torchrun --help": timed(cluster, [str(torchrun_path()), "--help"]),
                }
                measured = alternate(cases, 3 if quick() else 20, deadline)
            finally:
                ray.end()
    ms = {name: [1000 * value for value in values] for name, values in measured.items()}
    peers = {name: ms[name] for name in ("ray --help", "torchrun --help")}
    return [
        row("`racimo --help`, p50", ms["racimo --help"], "ms", Goal("<", 150), peers=peers),
        row("`racimo ps`, p50", ms["racimo ps"], "ms", Goal("<", 300), peers={"ray status": ms["ray status"]}),
        row(
            f"idle cluster, all {len(idle)} processes",
            cpu,
            "% of core",
            Goal("<", 2),
            peers={"idle Ray": round(ray_cpu, 2)},
        ),
        row(
            "resident memory, all processes",
            sum(memory.values()),
            "MB",
            peers=dict(memory) | {"idle Ray with a driver, together": round(ray_memory_mb)},
            note=f"Python {sys.version.split()[0]}; pages shared by forks are counted in each process",
        ),
    ]


def timed(cluster: Cluster, words: list[str]) -> Callable[[], float]:
    def call() -> float:
        start_s = time.monotonic()
        done = subprocess.run(words, env=cluster.environment, capture_output=True, timeout=COMMAND_LIMIT_S)
        took_s = time.monotonic() - start_s
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr.decode()[-500:]}")
        return took_s

    return call


def cpu_percent(processes: Iterable[psutil.Process], over_s: float) -> float:
    """CPU time of the processes over `over_s` seconds, in percent of one core."""
    watched = list(processes)
    before = cpu_s(watched)
    time.sleep(over_s)
    return 100 * (cpu_s(watched) - before) / over_s


def cpu_s(processes: list[psutil.Process]) -> float:
    running = [process.cpu_times() for process in processes if process.is_running()]
    return float(sum(times.user + times.system for times in running))
