"""The stage of several hosts that the tests play on (`tests/hosts`), for benchmarks; and one training run on it."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.commits import Commit, read_commits, wait_for
from bench.harness import say
from bench.peers import ROOT, PeerMissing, end_processes
from racimo.control.views import RunView
from racimo.spec.run import CheckpointSpec, RunSpec
from racimo.state.nouns import ENDED

sys.path.append(str(ROOT / "tests" / "hosts"))

from hosts_cluster import HostsCluster
from stage import Host, Hosts, why_not

__all__ = ["Host", "Hosts", "HostsCluster", "HostsJob", "require_hosts", "several", "submit"]

LOOK_EVERY_S = 1.0
STOP_LIMIT_S = 60.0
NODES_LIMIT_S = 60.0


def require_hosts() -> None:
    """Raises `PeerMissing` where no hosts can be made: a number is never left out in silence."""
    reason = why_not()
    if reason:
        raise PeerMissing(f"several hosts cannot be made here: {reason}")


@contextlib.contextmanager
def several(
    folder: Path, count: int, *, joined: int | None = None, slots: Any = 1, carrier: str = "link"
) -> Iterator[HostsCluster]:
    """`count` hosts, the first `joined` of them (default: all) one cluster."""
    require_hosts()
    with Hosts(count, folder=folder / "hosts") as hosts:
        cluster = HostsCluster(hosts, slots, carrier=carrier)
        cluster.up()
        for host in list(hosts)[1 : count if joined is None else joined]:
            cluster.join(host)
        cluster.wait_nodes(count if joined is None else joined, NODES_LIMIT_S)
        try:
            yield cluster
        finally:
            for host in hosts:
                host.heal()
            cluster.down()


class HostsJob:
    """A training run over hosts, from its submission on. `start_s`: the moment before `submit`."""

    def __init__(self, cluster: HostsCluster, run: str, start_s: float) -> None:
        self.cluster, self.id, self.start_s = cluster, run, start_s

    def commits(self, host: Host | None = None) -> list[Commit]:
        """Of all workers, or of those on one host."""
        hosts = [host] if host is not None else self.cluster.hosts
        folders = [self.cluster.home(one).node_dir / "workers" / self.id for one in hosts]
        return read_commits(path for folder in folders for path in folder.glob("*/*/steps.jsonl"))

    def worker_pids(self, host: Host | None = None) -> list[int]:
        return list(self.cluster.worker_pids(self.id, host).values())

    def whole(self, workers: int) -> bool:
        """So many workers live and have contributed to the newest step of anyone, or to the one before."""
        commits = self.commits()
        newest = max((commit.step for commit in commits), default=0)
        recent = {commit.worker for commit in commits if commit.step >= newest - 1 and commit.shards}
        return len(recent) == workers == len(self.worker_pids())

    def view(self) -> RunView:
        return self.cluster.view(self.id)

    def running(self) -> bool:
        """False once it has succeeded; raises if it ended otherwise."""
        view = self.view()
        if view.status in ENDED and view.status != "succeeded":
            raise RuntimeError(self.cluster.story(self.id, view))
        return view.status not in ENDED

    def wait_commits(self, steps: int, limit_s: float) -> None:
        """Until `steps` steps are committed; raises within a second if the run ends badly."""
        looked_s = time.monotonic()

        def reached() -> bool:
            nonlocal looked_s
            if max((commit.step for commit in self.commits()), default=0) >= steps:
                return True
            if time.monotonic() - looked_s < LOOK_EVERY_S:
                return False
            looked_s = time.monotonic()
            return not self.running()

        wait_for(reached, limit_s, f"step {steps} of {self.id}")

    def wait(self, limit_s: float) -> RunView:
        view = self.cluster.wait(self.id, limit_s)
        if view.status != "succeeded":
            raise RuntimeError(f"after {limit_s:.0f} s: {self.cluster.story(self.id, view)}")
        return view

    def hash(self) -> str:
        """What the workers that finished say of the final state; they must agree."""
        found = {path.read_text() for home in self.cluster.homes for path in home.output_dir(self.id).glob("hash.txt")}
        return found.pop() if len(found) == 1 else f"{len(found)} different ones"

    def stop(self) -> None:
        with self.cluster.api() as client:
            client.stop(self.id)
            client.wait(self.id, timeout_s=STOP_LIMIT_S)


def submit(
    cluster: HostsCluster,
    code: Path,
    workload: Any,
    workers: str | int,
    *,
    name: str = "",
    train: str = "racimo_job.py:train",
    config: dict[str, Any] | None = None,
) -> HostsJob:
    """The workload through `run.steps`."""
    spec = RunSpec(
        name=name,
        train=train,
        config=config if config is not None else {"workload": asdict(workload), "kills": []},
        workers=workers,
        checkpoint=CheckpointSpec(every=f"{workload.checkpoint_every} steps" if workload is not None else "10m"),
    )
    start_s = time.monotonic()
    return HostsJob(cluster, cluster.submit(spec, code), start_s)


def end_all(cluster: HostsCluster) -> None:
    """Whatever still runs on the hosts."""
    import psutil

    pids = [pid for host in cluster.hosts for pid in host.pids()]
    if pids:
        say(f"  {len(pids)} processes were left")
        end_processes([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])
