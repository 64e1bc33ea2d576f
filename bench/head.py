"""[head] Every process of the head is killed and started again while others train."""

import contextlib
import os
import signal
import time

import psutil

from bench.commits import first_commits, step_times_s, wait_for
from bench.harness import Goal, Row, percentile, quick, row, say
from bench.join import longest_step_s
from bench.peers import copy_jobs, scratch
from bench.pinned import hosts_pinned
from bench.stage import Host, HostsCluster, HostsJob, several, submit
from racimo.act.ray_status import read_ray_status
from racimo.spec.errors import RacimoError

HOSTS = 3
ROUNDS, QUICK_ROUNDS = 5, 1
DOWN_S = 3.0
STEPS = 1_000_000
LIMIT_S = 90.0
CALM_STEPS = 20
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def run() -> list[Row]:
    rounds = QUICK_ROUNDS if quick() else ROUNDS
    with scratch("head") as folder:
        code = copy_jobs(folder)
        with several(folder, HOSTS, slots=[0, 1, 1], carrier="ray") as cluster:
            wait_for(lambda: relays(cluster) == HOSTS, LIMIT_S, "Ray and its relays on all hosts")
            job = submit(cluster, code, hosts_pinned(STEPS), f"1..{HOSTS - 1}")
            job.wait_commits(CALM_STEPS, LIMIT_S)
            wait_for(lambda: job.whole(HOSTS - 1), LIMIT_S, "both workers")
            ray_only = [ray_killed(cluster, job) for _ in range(rounds)]
            everything = [head_killed(cluster, job) for _ in range(rounds)]
            attempts = job.view().attempt
            missing = missing_steps(job)
            generations = {commit.generation for commit in job.commits() if commit.step > CALM_STEPS}
            job.stop()
    beyond = [one["longest_s"] - one["median_s"] for one in ray_only + everything]
    return [
        row("all Ray processes of the head killed: longest training step beyond the median, worst",
            max(one["longest_s"] - one["median_s"] for one in ray_only), "s", Goal("<=", 1)),
        row("all Ray processes of the head killed: until all relays answer again, worst",
            max(one["answer_s"] for one in ray_only), "s", Goal("<=", 30),
            peers={"all": [round(one["answer_s"], 1) for one in ray_only]}),
        row("every process of the head killed, `up` again: longest training step beyond the median, worst",
            max(one["longest_s"] - one["median_s"] for one in everything), "s", Goal("<=", 1)),
        row("every process of the head killed: control process's start until all agents answer, worst",
            max(one["answer_s"] for one in everything), "s", Goal("<=", 3),
            peers={"all": [round(one["answer_s"], 2) for one in everything]}),
        row("every process of the head killed: until all relays answer again, worst",
            max(one["relays_s"] for one in everything), "s", Goal("<=", 30),
            peers={"all": [round(one["relays_s"], 1) for one in everything]}),
        row("training steps lost or done again", missing, "steps", Goal("==", 0)),
        row("attempts, generations of the training run", attempts, "attempts", Goal("==", 1),
            peers={"generations": len(generations)}),
        row("longest step beyond the median, all cases", beyond, "s"),
    ]  # fmt: skip


def ray_killed(cluster: HostsCluster, job: HostsJob) -> dict[str, float]:
    median_s = percentile(step_times_s(job.commits())[-100:], 50)
    killed_s = time.monotonic()
    for pid in ray_pids(cluster.head):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    killed_wall_s = time.time()
    wait_for(lambda: relays(cluster, killed_wall_s) == HOSTS, LIMIT_S, "all relays again")
    answer_s = time.monotonic() - killed_s
    calm(job)
    found = {"median_s": median_s, "longest_s": longest_step_s(job.commits(), killed_s), "answer_s": answer_s}
    say(f"  head's Ray killed: longest step {found['longest_s']:.2f} s, relays back after {answer_s:.1f} s")
    return found


def head_killed(cluster: HostsCluster, job: HostsJob) -> dict[str, float]:
    median_s = percentile(step_times_s(job.commits())[-100:], 50)
    killed_s, killed_wall_s = time.monotonic(), time.time()
    cluster.head.power_off()
    time.sleep(DOWN_S)
    typed_s = time.monotonic()
    cluster.up()
    wait_for(lambda: all_answer(cluster), LIMIT_S, "all agents")
    answered_s = time.monotonic()
    record = cluster.service(cluster.head, "control")
    assert record is not None
    started_s = record.start_ticks / TICKS_PER_S  # since boot, as CLOCK_MONOTONIC where nothing was suspended
    wait_for(lambda: relays(cluster, killed_wall_s) == HOSTS, LIMIT_S, "all relays again")
    relays_s = time.monotonic() - typed_s
    calm(job)
    found = {
        "median_s": median_s,
        "longest_s": longest_step_s(job.commits(), killed_s),
        "answer_s": answered_s - started_s,
        "relays_s": relays_s,
    }
    say(
        f"  head killed: longest step {found['longest_s']:.2f} s, agents answer {found['answer_s']:.2f} s after the "
        f"control process's start, relays {relays_s:.1f} s after `up`"
    )
    return found


def calm(job: HostsJob) -> None:
    newest = max(commit.step for commit in job.commits())
    job.wait_commits(newest + CALM_STEPS, LIMIT_S)


def all_answer(cluster: HostsCluster) -> bool:
    """Every node is up and its agent has just been asked for its free memory."""
    with contextlib.suppress(RacimoError):
        views = cluster.nodes().values()
        return len(views) == HOSTS and all(view.node.status == "up" and view.free_memory_bytes > 0 for view in views)
    return False


def missing_steps(job: HostsJob) -> int:
    """Steps that nobody applied, plus applications beyond one per worker."""
    commits = job.commits()
    steps = first_commits(commits)
    pairs = [(commit.worker, commit.step) for commit in commits]
    return max(steps) - len(steps) + len(pairs) - len(set(pairs))


def ray_pids(host: Host) -> list[int]:
    """What Ray itself runs on a host: its daemons and its workers."""
    found = []
    for pid in host.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            words = process.cmdline()
            first = words[0] if words else ""
            ours = any("racimo.agent" in word or "racimo.control" in word for word in words)
            if not ours and (process.name() in ("raylet", "gcs_server") or first.startswith("ray::")
                             or any("ray/_private" in word or "/ray/core/" in word for word in words)):  # fmt: skip
                found.append(pid)
    return found


def relays(cluster: HostsCluster, since_wall_s: float = 0.0) -> int:
    """Relays that answer, as the head's Ray part says, which must have come up after `since_wall_s`."""
    status = read_ray_status(cluster.home(cluster.head))
    if status is None or status.state != "up" or status.since_wall_s < since_wall_s:
        return 0
    return sum(state == "up" for state in status.relays.values())
