"""[recovery] From the SIGKILL of a worker to the next step committed that nobody had committed before."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from bench.cluster import Cluster, RacimoJob
from bench.commits import Commit, first_commits, new_step_after_s, redone_steps, step_times_s, wait_for
from bench.harness import Deadline, Goal, Row, percentile, quick, row, say
from bench.peers import RayCluster, RayJob, TorchrunJob, copy_jobs, require_peers, scratch
from bench.pinned import pinned

LIMIT_S = 120.0
WORKERS = 2
KILLS = 60
PEER_KILLS = 4
PEER_LIMIT_S = 90.0
"""A peer that shows no new step for so long is given up, and its recovery counts as this long."""
STEPS = 100_000
"""More than anybody reaches: the run is stopped at the end."""
PEER_STEPS_BETWEEN_KILLS = 15


def run() -> list[Row]:
    require_peers()
    kills, peer_kills = (4, 1) if quick() else (KILLS, PEER_KILLS)
    deadline = Deadline()
    workload = pinned(STEPS)
    with scratch("recov") as folder:
        code = copy_jobs(folder)
        with Cluster(folder, slots=WORKERS) as cluster:
            cluster.warm_up(code, pinned(3), WORKERS)
            ours, commits, step_s = kill_racimo(cluster, code, kills, deadline.share(0.6))
        torchrun_s, torchrun_redone = kill_peer(
            lambda: TorchrunJob(folder, code, workload, WORKERS), peer_kills, deadline.share(0.4)
        )
        ray = RayCluster(folder, code, cpus=WORKERS)
        try:
            ray_s, ray_redone = kill_peer(lambda: ray.submit(workload, WORKERS), peer_kills, deadline)
        finally:
            ray.end()
    limit_s = 1 + step_s
    in_time = sum(value <= limit_s for value in ours) / len(ours)
    return [
        row(
            f"share of {len(ours)} kills with a next step within 1 s plus a median step ({limit_s:.2f} s)",
            100 * in_time,
            "%",
            Goal(">=", 95),
        ),
        row(
            "SIGKILL to next committed step, p50",
            ours,
            "s",
            peers={"torchrun, restarts": torchrun_s, "Ray Train, max_failures=-1": ray_s},
            note=f"peers restart from their own checkpoint, written every 10 steps; {PEER_LIMIT_S:.0f} s: none came",
        ),
        row("SIGKILL to next committed step, p95", percentile(ours, 95), "s"),
        row("kills measured", len(ours), "kills", Goal(">=", kills)),
        row(
            "committed steps redone",
            redone_steps(commits, WORKERS),
            "steps",
            Goal("==", 0),
            peers={"torchrun, per kill": torchrun_redone, "Ray Train, per kill": ray_redone},
        ),
    ]


def kill_racimo(
    cluster: Cluster, code: Path, kills: int, deadline: Deadline
) -> tuple[list[float], list[Commit], float]:
    """(seconds per kill, all commits, median step). Each kill comes at a random moment of a step of the whole group."""
    random_source = random.Random(5)
    job = cluster.submit(code, pinned(STEPS), f"1..{WORKERS}")
    job.wait_commits(10, LIMIT_S)
    step_s = percentile(step_times_s(job.commits()), 50)
    found: list[float] = []
    for number in range(kills):
        if deadline.left_s <= 0:
            say(f"  out of time after {number} of {kills} kills")
            break
        wait_for(lambda: job.whole(WORKERS), LIMIT_S, "a whole group")
        time.sleep(random_source.uniform(0, 2 * step_s))
        moment_s = job.kill_one(random_source)
        found.append(next_step_s(job, moment_s, LIMIT_S))
    say(
        f"  racimo: {len(found)} kills, next step after {percentile(found, 50):.3f} s (p95 {percentile(found, 95):.3f})"
    )
    commits = job.commits()
    job.stop()
    return found, commits, step_s


def kill_peer(start: Callable[[], TorchrunJob | RayJob], kills: int, deadline: Deadline) -> tuple[list[float], float]:
    """(seconds per kill until a step that is new, steps redone per kill)."""
    random_source = random.Random(5)
    job = start()
    found: list[float] = []
    try:
        for number in range(kills):
            if number and deadline.left_s <= found[-1]:
                break
            goal = len(first_commits(job.commits())) + PEER_STEPS_BETWEEN_KILLS + random_source.randrange(10)
            await_steps(job, goal)
            moment_s = time.monotonic()
            os.kill(random_source.choice(job.worker_pids()), signal.SIGKILL)
            try:
                found.append(next_step_s(job, moment_s, PEER_LIMIT_S))
            except TimeoutError:
                say(f"  {type(job).__name__}: no new step within {PEER_LIMIT_S:.0f} s: given up, counted as that long")
                say(job.tail())
                found.append(PEER_LIMIT_S)
                break
            say(f"  {type(job).__name__}: next new step after {found[-1]:.2f} s")
        return found, round(redone_steps(job.commits(), WORKERS) / len(found), 1)
    finally:
        if isinstance(job, TorchrunJob):
            with contextlib.suppress(ProcessLookupError):
                job.end()


def await_steps(job: TorchrunJob | RayJob, steps: int) -> None:
    wait_for(lambda: len(first_commits(job.commits())) >= steps, LIMIT_S, f"{steps} steps of a peer")


def next_step_s(job: RacimoJob | TorchrunJob | RayJob, moment_s: float, limit_s: float) -> float:
    """Seconds from `moment_s` to the next new step; raises TimeoutError."""
    wait_for(lambda: new_step_after_s(job.commits(), moment_s) is not None, limit_s, "a next step")
    seconds = new_step_after_s(job.commits(), moment_s)
    assert seconds is not None
    return seconds
