"""[slow-step] A slow step is no dead peer; a rank that is stuck in C code is named with its line."""

import time
from pathlib import Path

from bench.commits import step_times_s, wait_for
from bench.harness import Goal, Row, quick, row, say
from bench.peers import copy_jobs, scratch
from bench.stage import HostsCluster, HostsJob, several, submit

HOSTS = 3
SLOW_STEPS, QUICK_SLOW_STEPS = 10, 2
SLOW_EVERY = 8
SLOW_S = 5.0
STUCK_S = 300
STUCK_AT = 10
NAMED_WITHIN_S = 90.0
LIMIT_S = 150.0
STUCK_LINE = 'ctypes.PyDLL(None).sleep(int(config["stuck_s"]))'


def run() -> list[Row]:
    slow_steps = QUICK_SLOW_STEPS if quick() else SLOW_STEPS
    with scratch("slow") as folder:
        code = copy_jobs(folder)
        line = line_number(code)
        with several(folder, HOSTS) as cluster:
            slow = slow_run(cluster, code, slow_steps)
            longest_s = max(step_times_s(slow.commits()))
            view = slow.view()
            gone = sum(worker.exit is not None and worker.exit.outcome != "finished" for worker in view.workers)
            alone = {commit.generation for commit in slow.commits()}
            named_s, words = stuck_run(cluster, code)
    return [
        row(f"workers evicted through {slow_steps} steps of {SLOW_S:g} s", gone, "workers", Goal("==", 0)),
        row("generations in which steps were committed", len(alone), "generations", Goal("==", 1)),
        row("longest step", longest_s, "s", Goal(">=", SLOW_S), note="that the steps were slow indeed"),
        row("a rank is stuck in C code: named after", named_s, "s", Goal("<=", NAMED_WITHIN_S), peers={"words": words}),
        row("its rank, and the line that it is stuck in, are among the words",
            int("rank 2" in words and f"slow_job.py:{line}" in words.replace('", line ', ":").replace(", line ", ":")),
            "yes=1", Goal("==", 1)),
    ]  # fmt: skip


def line_number(code: Path) -> int:
    lines = code.joinpath("slow_job.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if STUCK_LINE in line)


def slow_run(cluster: HostsCluster, code: Path, slow_steps: int) -> HostsJob:
    config = {"steps": SLOW_EVERY * slow_steps + 4, "slow_every": SLOW_EVERY, "slow_s": SLOW_S}
    job = submit(cluster, code, None, HOSTS, name="slow", train="slow_job.py:train", config=config)
    job.wait(LIMIT_S)
    say(f"  {slow_steps} slow steps are over")
    return job


def stuck_run(cluster: HostsCluster, code: Path) -> tuple[float, str]:
    """Seconds from the last step before it until some word of who is stuck, and the words."""
    config = {"steps": 10_000, "stuck_at": STUCK_AT, "stuck_s": STUCK_S}
    job = submit(cluster, code, None, HOSTS, name="stuck", train="slow_job.py:train", config=config)
    job.wait_commits(STUCK_AT - 1, LIMIT_S)
    stuck_s = time.monotonic()
    words = ""

    def named() -> bool:
        nonlocal words
        words = hung_words(cluster, job)
        return bool(words)

    try:
        wait_for(named, LIMIT_S, "a word of the stuck rank")
    except TimeoutError:
        say(cluster.story(job.id))
        raise
    seconds = time.monotonic() - stuck_s
    say(f"  after {seconds:.0f} s: {words}")
    cluster.wait(job.id, LIMIT_S)  # it is ended for this reason
    return seconds, words


def hung_words(cluster: HostsCluster, job: HostsJob) -> str:
    for line in cluster.command(cluster.head, "events", job.id).splitlines():
        if "hung" in line:
            return line.strip()
    time.sleep(1.0)
    return ""
