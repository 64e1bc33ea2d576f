"""Everything that may happen to a training run over hosts, drawn by a seed: for [churn] and [hosts-goodput]."""

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from typing import Any, Protocol

import psutil

from bench.commits import wait_for
from bench.harness import say
from bench.host_peers import HostPeer
from bench.stage import Host, Hosts, HostsCluster, HostsJob
from racimo.spec.errors import RacimoError

KINDS = ("worker", "agent", "relay", "raylet", "control", "cut", "leave", "join", "scale")
CUT_S = (5.0, 40.0)
"""How long a cable stays cut."""
SCALES = ("1..3", "2..3", "1..2", "1..3")
MOST_DRAWS = 100
JOIN_LIMIT_S = 60.0
COMMAND_LIMIT_S = 90.0


class Target(Protocol):
    """A system whose parts can be hit. Each returns False where there is nothing to hit now."""

    def kill(self, kind: str, host: Host) -> bool: ...

    def leave(self, host: Host) -> None: ...

    def join(self, host: Host) -> None: ...

    def scale(self, workers: str) -> bool: ...


class Disturber:
    """Draws one event after the other: `hosts[0]` never leaves, one cable is cut at a time, one host is away."""

    def __init__(
        self, target: Target, hosts: Hosts, seed: int, *, cut_s: tuple[float, float] = CUT_S, calm: float = 1.0
    ) -> None:
        """`calm`: factor on how long hosts stay cut, for short forms."""
        self.target, self.hosts, self.random = target, hosts, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._cut: Host | None = None
        self._timer: threading.Timer | None = None
        self._away: Host | None = None
        self._cut_s = (cut_s[0] * calm, cut_s[1] * calm)

    def strike(self) -> str:
        """One event, in words."""
        for _ in range(MOST_DRAWS):
            kind = self.random.choice(KINDS)
            words = self._try(kind)
            if words:
                self.counts[kind] += 1
                return words
        raise RuntimeError("no event was possible")

    def _try(self, kind: str) -> str:
        inside = [host for host in self.hosts if host is not self._away]
        host = self.random.choice(inside)
        match kind:
            case "cut":
                return self._cut_off(host) if self._cut is None else ""
            case "leave":
                others = [one for one in inside[1:] if one is not self._cut]
                if self._away is not None or not others:
                    return ""
                host = self.random.choice(others)
                self.target.leave(host)
                self._away = host
            case "join":
                if self._away is None or (self._cut is not None and self._cut is self.hosts[0]):
                    return ""
                host, self._away = self._away, None
                self.target.join(host)
            case "scale":
                workers = self.random.choice(SCALES)
                return f"scale to {workers}" if self._cut is None and self.target.scale(workers) else ""
            case _:
                host = self.hosts[0] if kind == "control" else host
                if not self.target.kill(kind, host):
                    return ""
        return f"{kind} {host.name}"

    def _cut_off(self, host: Host) -> str:
        seconds = self.random.uniform(*self._cut_s)
        self._cut = host
        host.cut()
        self._timer = threading.Timer(seconds, self._heal)
        self._timer.start()
        return f"cut {host.name} for {seconds:.0f} s"

    def _heal(self) -> None:
        if self._cut is not None:
            self._cut.heal()
            self._cut = None

    def repair(self) -> None:
        """All cables whole, all hosts in."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        self._heal()
        if self._away is not None:
            self.target.join(self._away)
            self._away = None


class RacimoTarget:
    def __init__(self, cluster: HostsCluster, job: HostsJob) -> None:
        self.cluster, self.job = cluster, job

    def kill(self, kind: str, host: Host) -> bool:
        pid = self._pid(kind, host)
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return True

    def _pid(self, kind: str, host: Host) -> int | None:
        if kind == "worker":
            return next(iter(self.job.worker_pids(host)), None)
        if kind in ("relay", "raylet"):
            return ray_pid(host, kind)
        record = self.cluster.service(self.cluster.head if kind == "control" else host, kind)
        return None if record is None else record.pid

    def leave(self, host: Host) -> None:
        self.cluster.command(host, "down", timeout_s=COMMAND_LIMIT_S)

    def join(self, host: Host) -> None:
        self.cluster.join(host)

    def scale(self, workers: str) -> bool:
        try:
            with self.cluster.api() as client:
                client.scale(self.job.id, workers)
        except RacimoError as error:
            if error.code != "wrong-state":  # it has ended
                raise
            return False
        return True


class PeerTarget:
    """A peer: what it does not have (a relay, a raylet, an agent) is its launcher on that host; where it has no part
    that could be hit and go on (its rendezvous host's, `scale`), a worker is killed in its place."""

    def __init__(self, job: HostPeer) -> None:
        self.job = job

    def kill(self, kind: str, host: Host) -> bool:
        if kind in ("agent", "relay", "raylet"):
            self.job.kill_launcher(host)
            return True
        pids = self.job.worker_pids(host) or self.job.worker_pids()
        for pid in pids[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(pids)

    def leave(self, host: Host) -> None:
        self.job.stop(host)

    def join(self, host: Host) -> None:
        self.job.start(host)

    def scale(self, workers: str) -> bool:
        return self.kill("worker", self.job.hosts[0])


def ray_pid(host: Host, kind: str) -> int | None:
    """The raylet of a host, or the relay actor that Ray runs there; None without a Ray part."""
    for pid in host.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            words = process.cmdline()
            relay = bool(words) and words[0].startswith("ray::") and "relay" in words[0].lower()
            if (kind == "raylet" and process.name() == "raylet") or (kind == "relay" and relay):
                return pid
    return None


def every_so_often(disturber: Disturber, events: int, every_s: float, within: tuple[float, float]) -> None:
    """One event in each span of `every_s`, at a drawn moment between the two fractions of it."""
    began_s = time.monotonic()
    for number in range(events):
        moment_s = began_s + (number + disturber.random.uniform(*within)) * every_s
        time.sleep(max(0.0, moment_s - time.monotonic()))
        say(f"    {time.monotonic() - began_s:.0f} s: {disturber.strike()}")
    time.sleep(max(0.0, began_s + events * every_s - time.monotonic()))


def at_steps(disturber: Disturber, job: Any, steps: list[int], limit_s: float) -> None:
    """One event when each of these steps is committed."""
    for step in steps:
        job.wait_commits(step, limit_s)
        words = disturber.strike()
        say(f"    step {step}: {words}")


def whole_again(cluster: HostsCluster, count: int) -> None:
    """All nodes up."""

    def up() -> bool:
        with contextlib.suppress(RacimoError):
            return sum(view.node.status == "up" for view in cluster.nodes().values()) == count
        return False

    wait_for(up, JOIN_LIMIT_S, f"{count} nodes")
