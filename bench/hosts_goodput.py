"""[hosts-goodput] Steps with a random event every 30 s for ten minutes on three hosts, of the undisturbed run's."""

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.commits import first_commits, wait_for
from bench.disturb import Disturber, PeerTarget, RacimoTarget, Target, every_so_often, plan, whole_again
from bench.harness import Goal, Row, quick, row, say
from bench.host_peers import RayHosts, TorchftHosts, TorchrunHosts, require_torchft, running
from bench.peers import copy_jobs, require_peers, scratch
from bench.pinned import hosts_pinned
from bench.stage import Hosts, HostsJob, require_hosts, several, submit

HOSTS = 3
SEED = 14
EVENTS, QUICK_EVENTS = 20, 3
EVERY_S, QUICK_EVERY_S = 30.0, 12.0
QUIET_S, QUICK_QUIET_S = 40.0, 6.0
"""Undisturbed, before and after."""
STEPS = 10_000_000
LIMIT_S = 240.0
FIRST_STEPS = 20
NOTE = (
    "undisturbed: the same run before the first and after the last event. The same drawn events for all: what a peer "
    "does not have (relay, raylet, agent) is its launcher on that host; control process and `scale`, a worker. "
    "Launchers are started again after 1 s. Peers checkpoint every 10 steps to a folder that needs no network; their "
    "collectives time out after 10 s (torchft: 5 s, as in its example). A torchft step with fewer hosts is less "
    "work, and counts"
)


def run() -> list[Row]:
    require_hosts()
    require_peers()
    require_torchft()
    events, every_s = (QUICK_EVENTS, QUICK_EVERY_S) if quick() else (EVENTS, EVERY_S)
    workload = hosts_pinned(STEPS)
    with scratch("hgood") as folder:
        code = copy_jobs(folder)
        with several(folder, HOSTS, carrier="ray") as cluster:
            job = submit(cluster, code, workload, f"1..{HOSTS}")
            ours = goodput("racimo", job, RacimoTarget(cluster, job), cluster.hosts)
            whole_again(cluster, HOSTS)
            job.stop()
        peers = {
            "torchrun elastic": peer(lambda hosts: TorchrunHosts(hosts, folder, code, workload), folder),
            "Ray Train elastic": peer(lambda hosts: RayHosts(hosts, folder, code, workload), folder),
            "torchft 0.2": peer(lambda hosts: TorchftHosts(hosts, folder, code, workload), folder),
        }
    return [
        row(
            f"steps with an event every {every_s:.0f} s, {events} in all, of the undisturbed run's",
            ours["share"],
            "%",
            Goal(">=", 90),
            peers={name: round(found["share"], 1) for name, found in peers.items()},
            note=NOTE,
        ),
        row("steps per second undisturbed", ours["quiet"], "steps/s",
            peers={name: round(found["quiet"], 2) for name, found in peers.items()}),
        row("seconds of undisturbed work lost per event, mean over all kinds", statistics.mean(ours["lost"].values()),
            "s", peers={"by kind": ours["lost"]}, note="until the next event"),
        row("events", sum(ours["kinds"].values()), "events", Goal("==", events), peers=ours["kinds"]),
    ]  # fmt: skip


def peer(make: Callable[[Hosts], Any], folder: Path) -> dict[str, Any]:
    with Hosts(HOSTS) as hosts, running(make(hosts)) as job:
        return goodput(job.name, job, PeerTarget(job), hosts)


def goodput(name: str, job: HostsJob | Any, target: Target, hosts: Hosts) -> dict[str, Any]:
    """`share` (percent) of steps per second while disturbed, by those before and after; `quiet`, steps per second."""
    events, every_s, quiet_s = (QUICK_EVENTS, QUICK_EVERY_S, QUICK_QUIET_S) if quick() else (EVENTS, EVERY_S, QUIET_S)
    wait_for(lambda: len(first_commits(job.commits())) >= FIRST_STEPS, LIMIT_S, f"{name}'s first steps")
    wait_for(lambda: len(job.worker_pids()) == HOSTS, LIMIT_S, f"{HOSTS} workers of {name}")
    disturber = Disturber(target, hosts, plan(SEED, events, HOSTS), haste=3.0 if quick() else 1.0)
    start_s = time.monotonic()
    time.sleep(quiet_s)
    disturbed_s = time.monotonic()
    try:
        every_so_often(disturber, every_s, (0.0, 0.5), SEED)
    finally:
        over_s = time.monotonic()
        disturber.repair()
    newest = len(first_commits(job.commits()))
    try:
        wait_for(lambda: len(first_commits(job.commits())) > newest, LIMIT_S, f"{name}'s next steps")
    except TimeoutError:
        say(f"  {name} commits no step any more {LIMIT_S:.0f} s after the last event\n{job.tail()}")
    again_s = time.monotonic()
    time.sleep(quiet_s)
    end_s = time.monotonic()
    moments = list(first_commits(job.commits()).values())

    def rate(begin_s: float, until_s: float) -> float:
        return sum(begin_s < moment <= until_s for moment in moments) / (until_s - begin_s)

    quiet = max(rate(start_s, disturbed_s), rate(again_s, end_s))
    busy = rate(disturbed_s, over_s)
    say(f"  {name}: {busy:.2f} steps/s with events, {quiet:.2f} without")
    lost: dict[str, list[float]] = {}
    for (begin_s, kind), (until_s, _) in itertools.pairwise([*disturber.moments, (over_s, "")]):
        lost.setdefault(kind, []).append((until_s - begin_s) * (1 - rate(begin_s, until_s) / quiet))
    return {
        "share": 100 * busy / quiet,
        "quiet": quiet,
        "kinds": dict(sorted(disturber.counts.items())),
        "lost": {kind: round(statistics.mean(seconds), 2) for kind, seconds in sorted(lost.items())},
    }
