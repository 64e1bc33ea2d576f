"""Everything that may happen to a training run over hosts, drawn by a seed: for [churn] and [hosts-goodput]."""

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
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
MOST_AWAY = 2
"""After so many other events a host that left joins again."""
SCALES = ("1..3", "2..3", "1..2", "1..3")
JOIN_LIMIT_S = 60.0
COMMAND_LIMIT_S = 90.0


class Target(Protocol):
    """A system whose parts can be hit. Each returns False where there is nothing to hit now."""

    def kill(self, kind: str, host: Host) -> bool: ...

    def leave(self, host: Host) -> None: ...

    def join(self, host: Host) -> None: ...

    def scale(self, workers: str) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Event:
    kind: str
    host: int = 0
    seconds: float = 0.0
    workers: str = ""


def plan(seed: int, count: int, num_hosts: int) -> list[Event]:
    """The same events for every system: the first host never leaves, and one host is away at a time."""
    source = random.Random(seed)
    events: list[Event] = []
    away: int | None = None
    left_at = 0
    while len(events) < count:
        kind = source.choice(KINDS)
        if away is not None and len(events) - left_at > MOST_AWAY:
            kind = "join"
        inside = [host for host in range(num_hosts) if host != away]
        host = source.choice(inside)
        match kind:
            case "control":
                host = 0
            case "leave":
                if away is not None:
                    continue
                away = host = source.choice(inside[1:])
                left_at = len(events)
            case "join":
                if away is None:
                    continue
                host, away = away, None
        seconds, workers = source.uniform(*CUT_S), source.choice(SCALES)
        events.append(Event(kind=kind, host=host, seconds=seconds, workers=workers))
    return events


class Disturber:
    """Carries out a plan, one event after the other. One cable is cut at a time: a new cut heals the one before."""

    def __init__(self, target: Target, hosts: Hosts, events: list[Event], *, haste: float = 1.0) -> None:
        """`haste`: so many times shorter are cuts, for short forms."""
        self.target, self.hosts, self.events = target, hosts, list(events)
        self.counts: Counter[str] = Counter()
        self.moments: list[tuple[float, str]] = []
        """When which kind of event struck (CLOCK_MONOTONIC)."""
        self._haste = haste
        self._next = 0
        self._cut: Host | None = None
        self._timer: threading.Timer | None = None
        self._away: Host | None = None

    def strike(self) -> str:
        """The next event, in words."""
        event, host = self.events[self._next], self.hosts[self.events[self._next].host]
        self._next += 1
        struck_s = time.monotonic()
        done = self._carry_out(event, host)
        kind = event.kind if done else "worker"
        if not done and not self.target.kill("worker", host):
            kind = "nothing"  # there is no worker anywhere
        self.counts[kind] += 1
        self.moments.append((struck_s, kind))
        detail = {"cut": f" for {event.seconds / self._haste:.0f} s", "scale": f" to {event.workers}"}
        where = "" if kind == "scale" else f" {host.name}"
        return f"{kind}{where}{detail.get(kind, '')}"

    def _carry_out(self, event: Event, host: Host) -> bool:
        """False where there was nothing of that kind to hit."""
        match event.kind:
            case "cut":
                self._heal()
                self._cut = host
                host.cut()
                self._timer = threading.Timer(event.seconds / self._haste, self._heal)
                self._timer.start()
            case "leave" | "join":
                if self._cut in (host, self.hosts[0]):
                    self._heal()  # a command typed there would wait for the cable
                if event.kind == "leave":
                    self.target.leave(host)
                    self._away = host
                else:
                    self._away = None
                    self.target.join(host)
            case "scale":
                return self.target.scale(event.workers)
            case _:
                return self.target.kill(event.kind, host)
        return True

    def _heal(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._cut is not None:
            self._cut.heal()
            self._cut = None

    def repair(self) -> None:
        """All cables whole, all hosts in."""
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
            return next(iter(self.job.worker_pids(host) or self.job.worker_pids()), None)
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


def every_so_often(disturber: Disturber, every_s: float, within: tuple[float, float], seed: int) -> None:
    """One event in each span of `every_s`, at a drawn moment between the two fractions of it."""
    source = random.Random(seed)
    began_s = time.monotonic()
    for number in range(len(disturber.events)):
        moment_s = began_s + (number + source.uniform(*within)) * every_s
        time.sleep(max(0.0, moment_s - time.monotonic()))
        say(f"    {time.monotonic() - began_s:.0f} s: {disturber.strike()}")
    time.sleep(max(0.0, began_s + len(disturber.events) * every_s - time.monotonic()))


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
