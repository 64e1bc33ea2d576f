"""[churn] Twenty events per run of all that may happen, ten seeds: the bits of the undisturbed one-worker run."""

import random
import time
from collections import Counter, defaultdict
from pathlib import Path

from bench.commits import Commit, step_times_s
from bench.disturb import Disturber, RacimoTarget, at_steps, plan, whole_again
from bench.harness import Deadline, Goal, Row, percentile, quick, row, say
from bench.peers import copy_jobs, scratch
from bench.pinned import Text, Workload, hosts_pinned
from bench.stage import HostsCluster, several, submit
from racimo.worker.train.batches import Batches

SEEDS, QUICK_SEEDS = 10, 1
EVENTS, QUICK_EVENTS = 20, 9
HOSTS = 3
CARRIER = "ray"
"""So that there are relays and raylets to kill."""
ALL_S = 25 * 60.0
RUN_S, QUICK_RUN_S = 95.0, 25.0
"""How long an undisturbed run is to take: ten disturbed ones must fit into 25 minutes, the reference besides."""
LIMIT_S = 300.0
CALIBRATE_STEPS = 40


def run() -> list[Row]:
    seeds, events, run_s = (QUICK_SEEDS, QUICK_EVENTS, QUICK_RUN_S) if quick() else (SEEDS, EVENTS, RUN_S)
    deadline = Deadline(ALL_S)
    with scratch("churn") as folder:
        code = copy_jobs(folder)
        with several(folder, HOSTS, carrier=CARRIER) as cluster:
            steps = calibrated_steps(cluster, code, run_s)
            reference = submit(cluster, code, hosts_pinned(steps), 1)
            reference.wait(LIMIT_S)
            expected = reference.hash()
            say(f"  {steps} steps, undisturbed on one worker: {expected[:16]}")
            began_s = time.monotonic()
            found = []
            for seed in range(seeds):
                if deadline.left_s < (time.monotonic() - began_s) / max(1, seed):
                    say(f"  out of time after {seed} of {seeds} seeds")
                    break
                found.append(disturbed(cluster, code, seed, steps, events))
            minutes = (time.monotonic() - began_s) / 60
    kinds: Counter[str] = sum((one[1] for one in found), Counter())
    same = sum(one[0] == expected for one in found)
    return [
        row(f"runs tried with {events} events each", len(found), "runs", Goal("==", seeds)),
        row("of them with the hash of the undisturbed one-worker run", same, "runs", Goal("==", len(found)),
            peers={"hash": expected}),
        row("events", sum(kinds.values()), "events", Goal("==", events * len(found)),
            peers=dict(sorted(kinds.items()))),
        row("steps in which a sample was left out or counted twice", sum(one[2] for one in found), "steps",
            Goal("==", 0)),
        row("attempts beyond the first", sum(one[3] for one in found), "attempts"),
        row("time of all seeds", minutes, "min", Goal("<=", 25)),
    ]  # fmt: skip


def calibrated_steps(cluster: HostsCluster, code: Path, run_s: float) -> int:
    job = submit(cluster, code, hosts_pinned(CALIBRATE_STEPS), HOSTS)
    job.wait(LIMIT_S)
    return max(60, int(run_s / percentile(step_times_s(job.commits(), skip=10), 50)))


def disturbed(
    cluster: HostsCluster, code: Path, seed: int, steps: int, events: int
) -> tuple[str, Counter[str], int, int]:
    """(hash, events by kind, steps whose samples were not counted once each, attempts beyond the first)."""
    workload = hosts_pinned(steps)
    job = submit(cluster, code, workload, f"1..{HOSTS}", name=f"churn-{seed}")
    disturber = Disturber(RacimoTarget(cluster, job), cluster.hosts, plan(seed, events, HOSTS))
    spots = random.Random(seed).sample(range(3, steps * 9 // 10), events)
    try:
        at_steps(disturber, job, sorted(spots), LIMIT_S)
    finally:
        disturber.repair()
    view = job.wait(LIMIT_S)
    whole_again(cluster, HOSTS)
    found = job.hash()
    took_s = time.monotonic() - job.start_s
    say(f"  seed {seed}: {dict(disturber.counts)}, {took_s:.0f} s, attempt {view.attempt}: {found[:16]}")
    return found, disturber.counts, wrong_steps(job.commits(), workload), view.attempt - 1


def wrong_steps(commits: list[Commit], workload: Workload) -> int:
    """Steps in which a sample was left out or counted twice, by what each worker wrote of all contributions to it. Of a
    step with lines of two generations, whoever committed it in the older one died alone; the newer counts."""
    batches = Batches(
        Text(workload.block), workload.global_batch_size, seed=workload.seed, micro_shards=workload.micro_shards
    )
    by_step: dict[int, list[Commit]] = defaultdict(list)
    for commit in commits:
        by_step[commit.step].append(commit)
    wrong = 0
    for step in range(1, workload.steps + 1):
        lines = by_step[step]
        newest = max((commit.generation for commit in lines), default=0)
        counted = [
            sorted(shard for shards in commit.contributions.values() for shard in shards)
            for commit in lines
            if commit.generation == newest
        ]
        present = batches.present(step - 1, workload.micro_shards)
        one_loss = len({commit.loss for commit in lines}) == 1
        wrong += not (one_loss and all(shards == present for shards in counted))
    return wrong
