"""[step] Steady throughput of a GPT of about 10 million parameters: `run.steps` against the same work under DDP."""

from collections.abc import Callable
from pathlib import Path

from bench.cluster import Cluster, RacimoJob
from bench.commits import first_commits, step_times_s, wait_for
from bench.harness import Deadline, Goal, Row, Spread, alternate, percentile, quick, ratios, row, spread
from bench.peers import TorchrunJob, copy_jobs, require_peers, resident_bytes, scratch
from bench.pinned import ten_million

LIMIT_S = 120.0
WARM_STEPS = 3
GOALS = {"fast": Goal(">=", 0.98), "exact": Goal(">=", 0.85)}


def run() -> list[Row]:
    require_peers()
    deadline = Deadline()
    rows: list[Row] = []
    with scratch("step") as folder:
        code = copy_jobs(folder)
        with Cluster(folder, slots=3) as cluster:
            cluster.warm_up(code, ten_million(2, workers=2), 2)
            for workers, part in ((2, 0.5), (3, 1.0)):
                rows += compare(cluster, folder, code, workers, deadline.share(part))
    return rows


def compare(cluster: Cluster, folder: Path, code: Path, workers: int, deadline: Deadline) -> list[Row]:
    steps = 6 if quick() else 14
    memory_mb: dict[str, list[tuple[float, float]]] = {}

    def racimo(coherence: str) -> Callable[[], float]:
        def measure() -> float:
            job = cluster.submit(code, ten_million(steps, workers, coherence), workers)
            return throughput(job, coherence)

        return measure

    def torchrun() -> float:
        return throughput(TorchrunJob(folder, code, ten_million(steps, workers), workers), "ddp")

    def throughput(job: RacimoJob | TorchrunJob, name: str) -> float:
        """Steps per second, from the median step; memory is read in the middle."""
        wait_for(lambda: len(first_commits(job.commits())) > steps // 2, LIMIT_S, f"the middle of {name}")
        shared, private = resident_bytes(job.worker_pids())
        memory_mb.setdefault(name, []).append((shared / workers / 1e6, private / workers / 1e6))
        job.wait(LIMIT_S)
        return 1 / percentile(step_times_s(job.commits(), skip=WARM_STEPS), 50)

    cases = {"ddp": torchrun, "fast": racimo("fast"), "exact": racimo("exact")}
    measured = alternate(cases, 1 if quick() else 5, deadline, seed=workers)
    rows = []
    for coherence, goal in GOALS.items():
        peers = {
            f"{name}, steps/s": spread(measured[name]) if name != coherence else spread(measured[coherence])
            for name in ("ddp", coherence)
        }
        note = f"median step of each run, {steps - WARM_STEPS} steps, two micro-shards of 256 tokens per worker"
        ratio = ratios(measured[coherence], measured["ddp"])
        rows.append(
            row(f'"{coherence}" against torchrun with DDP, {workers} workers', ratio, "x", goal, peers=peers, note=note)
        )
    for name in ("fast", "exact"):
        rows.append(
            row(
                f'memory per worker, "{name}", {workers} workers, shared pages split (PSS)',
                [shared for shared, _ in memory_mb[name]],
                "MB",
                peers={
                    "ours, private (USS)": private_spread(memory_mb[name]),
                    "ddp (PSS)": spread([shared for shared, _ in memory_mb["ddp"]]),
                    "ddp, private (USS)": private_spread(memory_mb["ddp"]),
                },
            )
        )
    return rows


def private_spread(pairs: list[tuple[float, float]]) -> Spread:
    return spread([private for _, private in pairs])
