"""[fleet] 2,000 simulated agents on the real link protocol, and what they cost the control process."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from bench.harness import Goal, Row, percentile, quick, row, say
from bench.peers import scratch
from bench.stage import Hosts, HostsCluster, require_hosts
from racimo.spec.run import RunSpec

AGENTS, QUICK_AGENTS = 2_000, 200
PROCESSES = 2
IDLE_S, QUICK_IDLE_S = 60.0, 8.0
SETTLE_S = 10.0
"""After the last link is up, before idleness is measured."""
SUBMITS, QUICK_SUBMITS = 60, 8
RESTARTS, QUICK_RESTARTS = 3, 1
LIMIT_S = 180.0


def run() -> list[Row]:
    require_hosts()
    count, idle_s, submits, restarts = (
        (QUICK_AGENTS, QUICK_IDLE_S, QUICK_SUBMITS, QUICK_RESTARTS) if quick() else (AGENTS, IDLE_S, SUBMITS, RESTARTS)
    )
    with scratch("fleet") as folder, Hosts(1, folder=folder / "hosts") as hosts:
        cluster = HostsCluster(hosts, slots=1)
        cluster.up()
        began_s = time.monotonic()
        with fleet(cluster, folder, count) as agents:
            linked_s = agents.wait_linked(count) - began_s
            say(f"  {count} agents linked {linked_s:.1f} s after the first was started")
            time.sleep(SETTLE_S)
            idle = cpu_share(cluster, idle_s)
            say(f"  control process idle: {100 * idle:.1f} % of a core")
            starts = [submit_to_start_s(cluster, agents, number) for number in range(submits)]
            memory_mb = control(cluster).memory_info().rss / 1e6
            again = [restart_s(cluster, agents, count) for _ in range(restarts)]
        cluster.down()
    return [
        row(f"control process idle with {count} agents, CPU", 100 * idle, "% of a core", Goal("<", 20)),
        row("SDK submit to the order at an agent, p50", starts, "s", Goal("<=", 0.3)),
        row("SDK submit to the order at an agent, p95", percentile(starts, 95), "s"),
        row(f"control process killed: to all {count} agents reconciled, worst", max(again), "s", Goal("<=", 10),
            peers={"all": [round(value, 2) for value in again]},
            note="from the SIGKILL until every agent's link is up, its report taken up and its events asked for"),
        row("first link of all agents, from their start", linked_s, "s"),
        row("memory of the control process, resident", memory_mb, "MB"),
    ]  # fmt: skip


class Agents:
    """The processes that play the agents, and what they tell."""

    def __init__(self, processes: list["subprocess.Popen[str]"]) -> None:
        self._told: queue.Queue[dict[str, Any]] = queue.Queue()
        for process in processes:
            threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._told.put(json.loads(line))

    def _next(self, deadline_s: float, what: str) -> dict[str, Any]:
        try:
            return self._told.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise TimeoutError(f"{what} did not come within {LIMIT_S:.0f} s") from None

    def wait_linked(self, count: int) -> float:
        """Until so many agents have linked from now on; the moment of the last one."""
        deadline_s = time.monotonic() + LIMIT_S
        linked: set[str] = set()
        troubles = 0
        while True:
            found = self._next(deadline_s, f"the link of {count - len(linked)} agents ({troubles} troubles)")
            if "trouble" in found:
                troubles += 1
                if troubles <= 3:
                    say(f"  {found['trouble']}: {found['why']}")
            if "linked" in found:
                linked.add(found["linked"])
                if len(linked) == count:
                    return float(found["at_s"])

    def wait_started(self, run: str) -> float:
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            found = self._next(deadline_s, f"the start of {run}")
            if found.get("started", "").startswith(f"{run}/"):
                return float(found["at_s"])

    def forget(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._told.get_nowait()


@contextlib.contextmanager
def fleet(cluster: HostsCluster, folder: Path, count: int) -> Iterator[Agents]:
    token = folder / "token"
    token.touch(0o600)
    token.write_text(cluster.token())
    certificate = str(cluster.home(cluster.head).certificate_file)
    common = ["--head", cluster.address, "--certificate", certificate, "--token-file", str(token)]
    share = -(-count // PROCESSES)
    processes = [
        cluster.head.popen(
            [sys.executable, "-m", "bench.fleet_agents", *common, "--first", str(first), "--count",
             str(min(share, count - first))],
            stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(Path(__file__).parent.parent)},
        )
        for first in range(0, count, share)
    ]  # fmt: skip
    try:
        yield Agents(processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def control(cluster: HostsCluster) -> psutil.Process:
    record = cluster.service(cluster.head, "control")
    assert record is not None, "there is no control process"
    return psutil.Process(record.pid)


def cpu_share(cluster: HostsCluster, window_s: float) -> float:
    process = control(cluster)
    before, began_s = process.cpu_times(), time.monotonic()
    time.sleep(window_s)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / (time.monotonic() - began_s)


def submit_to_start_s(cluster: HostsCluster, agents: Agents, number: int) -> float:
    """A run that only a fleet of such nodes can take (the head has one slot), stopped again."""
    spec = RunSpec(command=("true",), files="", name=f"fleet-{number}", devices="cpu:2")
    with cluster.api() as client:
        began_s = time.monotonic()
        view = client.submit(spec)
        seconds = agents.wait_started(view.id) - began_s
        client.stop(view.id)
        client.wait(view.id, timeout_s=60)
    return seconds


def restart_s(cluster: HostsCluster, agents: Agents, count: int) -> float:
    agents.forget()
    killed_s = time.monotonic()
    os.kill(control(cluster).pid, signal.SIGKILL)
    seconds = agents.wait_linked(count) - killed_s
    say(f"  control process killed: {count} agents reconciled after {seconds:.1f} s")
    time.sleep(SETTLE_S)
    return seconds
