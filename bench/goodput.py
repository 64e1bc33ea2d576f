"""[goodput] Steps done with one SIGKILL a minute, as a share of the undisturbed run's in the same time.

Five minutes of kills for Racimo, two for each peer: this is the one benchmark that takes longer than six minutes.
"""

import itertools
import os
import random
import signal
import time

from bench.cluster import Cluster, RacimoJob
from bench.commits import first_commits, wait_for
from bench.harness import Goal, Row, quick, row, say
from bench.peers import RayCluster, RayJob, TorchrunJob, copy_jobs, require_peers, scratch
from bench.pinned import pinned

LIMIT_S = 120.0
WORKERS = 2
STEPS = 100_000
MINUTE_S = 60.0
AFTER_KILL_S = 25.0
"""So long after a kill nothing counts as undisturbed."""
Job = RacimoJob | TorchrunJob | RayJob


def run() -> list[Row]:
    require_peers()
    minutes, peer_minutes, undisturbed_s, minute_s = (1, 1, 8.0, 20.0) if quick() else (5, 2, 60.0, MINUTE_S)
    workload = pinned(STEPS)
    with scratch("good") as folder:
        code = copy_jobs(folder)
        with Cluster(folder, slots=WORKERS) as cluster:
            job = cluster.submit(code, workload, f"1..{WORKERS}")
            ours = goodput("racimo", job, minutes, minute_s, undisturbed_s)
            job.stop()
        torchrun = TorchrunJob(folder, code, workload, WORKERS)
        try:
            torchrun_share = goodput("torchrun", torchrun, peer_minutes, minute_s, undisturbed_s / 2)
        finally:
            torchrun.end()
        ray = RayCluster(folder, code, cpus=WORKERS)
        try:
            ray_share = goodput("ray train", ray.submit(workload, WORKERS), peer_minutes, minute_s, undisturbed_s / 2)
        finally:
            ray.end()
    return [
        row(
            f"steps with one SIGKILL a minute for {minutes * minute_s / 60:.2g} minutes, of the undisturbed run's",
            ours,
            "%",
            Goal(">=", 95),
            peers={
                f"torchrun, {peer_minutes} kills": torchrun_share,
                f"Ray Train, {peer_minutes} kills": ray_share,
            },
            note="undisturbed: the same run before the first kill, and from 25 s after each until the next or the end; "
            "peers checkpoint every 10 steps",
        )
    ]


def goodput(name: str, job: Job, minutes: int, minute_s: float, undisturbed_s: float) -> float:
    """Percent: new steps per second while it is disturbed, by those before and after."""
    wait_for(lambda: len(first_commits(job.commits())) >= 10, LIMIT_S, f"{name}'s first steps")
    random_source = random.Random(7)
    kills_s: list[float] = []
    start_s = time.monotonic()
    time.sleep(undisturbed_s / 2)
    disturbed_s = time.monotonic()
    for minute in range(minutes):
        offset_s = random_source.uniform(0.1, 0.6) * minute_s
        sleep_until(disturbed_s + minute * minute_s + offset_s)
        kills_s.append(time.monotonic())
        os.kill(random_source.choice(job.worker_pids()), signal.SIGKILL)
        sleep_until(disturbed_s + (minute + 1) * minute_s)
    over_s = time.monotonic()
    wait_for(lambda: len(job.worker_pids()) >= WORKERS, LIMIT_S, f"a whole group of {name}")
    newest = len(first_commits(job.commits()))
    wait_for(lambda: len(first_commits(job.commits())) > newest, LIMIT_S, f"{name}'s next steps")
    again_s = time.monotonic()
    time.sleep(undisturbed_s / 2)
    end_s = time.monotonic()
    moments = first_commits(job.commits()).values()

    def count(begin_s: float, until_s: float) -> int:
        return sum(begin_s < moment <= until_s for moment in moments)

    # The machine's own speed drifts over minutes: undisturbed is also what lies far enough behind each kill.
    clean = [(start_s, disturbed_s), (again_s, end_s)]
    clean += itertools.pairwise([disturbed_s, *kills_s])
    clean = [(begin_s + (AFTER_KILL_S if begin_s in kills_s else 0.0), until_s) for begin_s, until_s in clean]
    clean.append((kills_s[-1] + AFTER_KILL_S, over_s))
    clean = [(begin_s, until_s) for begin_s, until_s in clean if until_s > begin_s]
    quiet_rate = sum(count(*span) for span in clean) / sum(until_s - begin_s for begin_s, until_s in clean)
    rate = count(disturbed_s, over_s) / (over_s - disturbed_s)
    say(f"  {name}: {rate:.2f} steps/s with kills, {quiet_rate:.2f} without")
    return 100 * rate / quiet_rate


def sleep_until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.monotonic()))
