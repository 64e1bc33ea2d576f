"""[join] A third host joins a run with 100 MB of state: what the others notice, and how soon it contributes.

Twice a round: a whole machine joins the cluster and gets a worker (its services start on the two cores on which the
others compute), and a worker joins on a machine that is a node already (`scale`).
"""

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any

from bench.commits import Commit, first_commits, step_times_s, wait_for
from bench.harness import Goal, Row, percentile, quick, row, say
from bench.host_peers import RayHosts, TorchrunHosts
from bench.peers import copy_jobs, require_peers, scratch
from bench.pinned import hundred_megabytes
from bench.stage import Hosts as Stage
from bench.stage import HostsCluster, HostsJob, require_hosts, several, submit
from racimo.spec.errors import RacimoError

HOSTS = 3
ROUNDS, QUICK_ROUNDS = 5, 1
PEER_ROUNDS, QUICK_PEER_ROUNDS = 2, 1
STEPS = 100_000
BEFORE_STEPS = 12
"""Steps of two hosts before the third comes."""
AFTER_STEPS = 4
"""Steps after its first contribution, which still count as its joining."""
LIMIT_S = 240.0
LEAST_STEP_S = 0.5


def run() -> list[Row]:
    require_hosts()
    require_peers()
    rounds, peer_rounds = (QUICK_ROUNDS, QUICK_PEER_ROUNDS) if quick() else (ROUNDS, PEER_ROUNDS)
    workload = hundred_megabytes(STEPS)
    with scratch("join") as folder:
        code = copy_jobs(folder)
        with several(folder, HOSTS, joined=HOSTS - 1) as cluster:
            job = submit(cluster, code, workload, f"1..{HOSTS}")
            ours, grown = [], []
            for number in range(rounds):
                ours.append(join_machine(cluster, job))
                grown.append(join_worker(cluster, job))
                if number < rounds - 1:
                    cluster.command(list(cluster.hosts)[-1], "down", timeout_s=LIMIT_S)
            job.stop()
        torchrun = [join_peer(lambda hosts: TorchrunHosts(hosts, folder, code, workload)) for _ in range(peer_rounds)]
        ray = [join_peer(lambda hosts: RayHosts(hosts, folder, code, workload, least=2)) for _ in range(peer_rounds)]
    return [
        row("median step before", [one["median_s"] for one in ours], "s", Goal(">=", LEAST_STEP_S),
            peers=by_peer(torchrun, ray, "median_s")),
        *rows_of("a machine joins", ours, by_peer(torchrun, ray, "ratio"), "appearing: the node is up at the head"),
        row("a machine joins: longest step of the others", [one["longest_s"] for one in ours], "s",
            peers=by_peer(torchrun, ray, "longest_s")),
        row("a machine joins: command to first contribution", [one["typed_s"] for one in ours], "s",
            peers=by_peer(torchrun, ray, "typed_s"),
            note="peers: torchrun --nnodes=2:3 and Ray Train with 2 to 3 workers, from the start of the launcher"),
        *rows_of("a worker joins", grown, {}, "appearing: the command `scale`"),
    ]  # fmt: skip


def rows_of(what: str, rounds: list[dict[str, float]], peers: dict[str, Any], note: str) -> list[Row]:
    ratios = [one["longest_s"] / one["median_s"] for one in rounds]
    return [
        row(f"{what}: longest step of the others, in median steps, worst round", max(ratios), "x", Goal("<=", 1.5),
            peers=peers | {"all rounds": [round(ratio, 2) for ratio in ratios]}),
        row(f"{what}: appearing to first contribution, worst round", max(one["contributes_s"] for one in rounds), "s",
            Goal("<=", 5), peers={"all rounds": [round(one["contributes_s"], 2) for one in rounds]}, note=note),
    ]  # fmt: skip


def by_peer(torchrun: list[dict[str, float]], ray: list[dict[str, float]], key: str) -> dict[str, Any]:
    names = {"torchrun elastic": torchrun, "Ray Train elastic": ray}
    return {
        name: [one["longest_s"] / one["median_s"] if key == "ratio" else one[key] for one in found]
        for name, found in names.items()
    }


def join_machine(cluster: HostsCluster, job: HostsJob) -> dict[str, float]:
    newcomer = list(cluster.hosts)[-1]
    median_s = median_step_s(job)
    words = ["join", cluster.address, "--token-file", "-", "--slots", "1"]
    typed_s = time.monotonic()
    cluster.command(newcomer, *words, input=cluster.token(), timeout_s=LIMIT_S)
    wait_for(lambda: is_up(cluster, newcomer.name), LIMIT_S, "the third node")
    return await_contribution(cluster, job, median_s, typed_s, appeared_at_s(cluster, newcomer.name, typed_s))


def join_worker(cluster: HostsCluster, job: HostsJob) -> dict[str, float]:
    """The one that joined last leaves, and another one joins in its place on the same machine."""
    with cluster.api() as client:
        client.scale(job.id, str(HOSTS - 1))
        wait_for(lambda: client.run(job.id).num_live_workers == HOSTS - 1, LIMIT_S, "one worker less")
        median_s = median_step_s(job)
        typed_s = time.monotonic()
        client.scale(job.id, f"1..{HOSTS}")
    return await_contribution(cluster, job, median_s, typed_s, typed_s)


def median_step_s(job: HostsJob) -> float:
    """Of the next steps, before anybody joins."""
    newest = max((commit.step for commit in job.commits()), default=0)
    job.wait_commits(newest + BEFORE_STEPS, LIMIT_S)
    return percentile(step_times_s(job.commits())[-BEFORE_STEPS + 2 :], 50)


def await_contribution(
    cluster: HostsCluster, job: HostsJob, median_s: float, typed_s: float, appeared_s: float
) -> dict[str, float]:
    newcomer = list(cluster.hosts)[-1]
    first_s = first_contribution_s(lambda: [c for c in job.commits(newcomer) if c.shards], typed_s)
    newest = max(commit.step for commit in job.commits())
    job.wait_commits(newest + AFTER_STEPS, LIMIT_S)
    others = [commit for host in list(cluster.hosts)[:-1] for commit in job.commits(host)]
    found = {
        "median_s": median_s,
        "longest_s": longest_step_s(others, typed_s),
        "contributes_s": first_s - appeared_s,
        "typed_s": first_s - typed_s,
    }
    say(f"  racimo: {words_of(found)}, {found['contributes_s']:.2f} s after appearing")
    return found


def is_up(cluster: HostsCluster, name: str) -> bool:
    with contextlib.suppress(RacimoError):
        view = cluster.nodes().get(name)
        return view is not None and view.node.status == "up"
    return False


def appeared_at_s(cluster: HostsCluster, name: str, typed_s: float) -> float:
    """When the control process wrote down that it met this node's agent; no later than now."""
    log = (cluster.home(cluster.head).service_logs_dir / "control.log").read_text().splitlines()
    met = [line for line in log if "connected to the agent of node" in line and f" {name}" in line]
    if not met:
        return time.monotonic()
    stamp = met[-1][:23]
    wall_s = time.mktime(time.strptime(stamp[:19], "%Y-%m-%d %H:%M:%S")) + int(stamp[20:23]) / 1000
    return max(typed_s, min(time.monotonic(), time.monotonic() - (time.time() - wall_s)))


def join_peer(make: Callable[[Stage], Any]) -> dict[str, float]:
    with Stage(HOSTS) as hosts:
        job = make(hosts)
        try:
            for host in list(hosts)[:-1]:
                job.start(host)
            if isinstance(job, RayHosts):
                job.fit()
            wait_for(lambda: len(first_commits(job.commits())) >= BEFORE_STEPS, LIMIT_S, "the peer's first steps")
            median_s = percentile(step_times_s(job.commits()), 50)
            typed_s = time.monotonic()
            newcomer = hosts[HOSTS - 1]
            job.start(newcomer)

            def contributions() -> list[Commit]:
                pids = set(job.worker_pids(newcomer))
                return [commit for commit in job.commits() if commit.pid in pids]

            first_s = first_contribution_s(contributions, typed_s)
            newest = len(first_commits(job.commits()))
            wait_for(lambda: len(first_commits(job.commits())) >= newest + AFTER_STEPS, LIMIT_S, "its next steps")
            found = {
                "median_s": median_s,
                "longest_s": longest_step_s(job.commits(), typed_s),
                "typed_s": first_s - typed_s,
            }
        except TimeoutError:
            say(job.tail())
            raise
        finally:
            job.end()
    say(f"  {job.name}: {words_of(found)}")
    return found


def first_contribution_s(contributions: Callable[[], list[Commit]], after_s: float) -> float:
    def moments() -> list[float]:
        return [commit.t for commit in contributions() if commit.t > after_s]

    wait_for(lambda: bool(moments()), LIMIT_S, "a contribution of the third host")
    return min(moments())


def longest_step_s(commits: list[Commit], since_s: float) -> float:
    """The longest time between neighbouring new steps, the last before `since_s` included."""
    moments = sorted(first_commits(commits).values())
    before = [moment for moment in moments if moment <= since_s][-1:]
    window = before + [moment for moment in moments if moment > since_s]
    return max(after - earlier for earlier, after in itertools.pairwise(window))


def words_of(found: dict[str, float]) -> str:
    return (
        f"median step {found['median_s']:.2f} s, longest {found['longest_s']:.2f} s; "
        f"contributes {found['typed_s']:.1f} s after the command"
    )
