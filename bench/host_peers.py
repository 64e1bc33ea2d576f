"""The peers on several hosts, each as its documentation on elasticity and failures has it.

A host's launcher is started again a second after it ended, as a service manager would do it, and checkpoints lie in a
folder that all hosts share without a network between: both in the peers' favour.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import psutil

from bench.commits import Commit, read_commits, wait_for
from bench.harness import say
from bench.peers import (
    RAY_VENV,
    ROOT,
    START_LIMIT_S,
    TORCHRUN_VARIABLES,
    PeerMissing,
    clean_environment,
    descendants,
    end_processes,
    make_venv,
    torchrun_path,
)
from bench.stage import Host, Hosts

TORCHFT_VENV = ROOT / ".venvs" / "torchft"
TORCHFT_PACKAGES = ("torchft==0.2.0", "torch==2.13.0", "numpy")
AGAIN_AFTER_S = 1.0
COLLECTIVE_TIMEOUT_S = 10
"""torch's default of 30 minutes would make every cut cable one of 30 minutes."""
RDZV_CONF = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=600"
"""By default torchrun waits 30 s for more hosts whenever not all are there, and 15 s for a silent one."""
RAY_LOOKS_EVERY_S = 5.0
"""By default Ray Train looks for new hosts once a minute."""


def require_torchft() -> None:
    if not (TORCHFT_VENV / ".ready").exists():
        raise PeerMissing(f"torchft is not installed in {TORCHFT_VENV}; run: {sys.executable} -m bench.host_peers")


class HostPeer(Protocol):
    """A job of some system over hosts, as the benchmarks see it."""

    def start(self, host: Host) -> None:
        """Begins to take part with this host."""

    def stop(self, host: Host) -> None:
        """Leaves, politely."""

    def kill_launcher(self, host: Host) -> None: ...

    def commits(self) -> list[Commit]: ...

    def worker_pids(self, host: Host | None = None) -> list[int]: ...

    def tail(self) -> str: ...

    def end(self) -> None: ...


class Kept:
    """A program on a host that is started again whenever it ends, until `stop`."""

    def __init__(self, host: Host, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.host, self._words, self._environment, self._log = host, list(words), dict(environment), log
        self._stopping = threading.Event()
        self.process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        while not self._stopping.is_set():
            with self._log.open("ab") as log:
                self.process = subprocess.Popen(
                    self.host.command(self._words),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment | {"HOME": str(self.host.folder)},
                    start_new_session=True,
                )
            self.process.wait()
            self._stopping.wait(AGAIN_AFTER_S)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def stop(self, grace_s: float = 10.0) -> None:
        self._stopping.set()
        process = self.process
        if process is not None and process.poll() is None:
            children = descendants(process.pid)
            end_processes([psutil.Process(process.pid), *children], grace_s)
        self._thread.join(grace_s)


class _Job:
    """What all peers have in common: one `Kept` per host, and a folder of commits."""

    name = ""

    def __init__(self, hosts: Hosts, folder: Path, code: Path, workload: Any) -> None:
        self.hosts, self.code, self.workload = hosts, code, workload
        self.out = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=folder))
        self._kept: dict[str, Kept] = {}

    def _keep(self, host: Host, words: Sequence[str], **variables: str) -> None:
        # With one process per host neither torchrun nor Ray limits threads, and three hosts share this machine's cores.
        environment = clean_environment(
            GLOO_SOCKET_IFNAME="eth0", TP_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1", **variables
        )
        self._kept[host.name] = Kept(host, words, environment, self.out / f"{host.name}.log")

    def stop(self, host: Host) -> None:
        self._kept.pop(host.name).stop()

    def kill_launcher(self, host: Host) -> None:
        self._kept[host.name].kill()

    def commits(self) -> list[Commit]:
        return read_commits(self.out.glob("steps-*.jsonl"))

    def worker_pids(self, host: Host | None = None) -> list[int]:
        """Those that live and have committed something, on one host or all."""
        pids = {int(path.stem.rsplit("-", 1)[1]) for path in self.out.glob("steps-*.jsonl")}
        there = {pid for one in ([host] if host else self.hosts) for pid in one.pids()}
        return sorted(pids & there)

    def tail(self) -> str:
        lines = []
        for path in sorted(self.out.glob("*.log")):
            lines += [f"{path.name}: {line}" for line in path.read_text(errors="replace").splitlines()[-8:]]
        return "\n".join(lines)

    def end(self) -> None:
        for kept in self._kept.values():
            kept.stop(grace_s=3.0)
        self._kept.clear()
        left = [pid for host in self.hosts for pid in host.pids()]
        end_processes([psutil.Process(pid) for pid in left if psutil.pid_exists(pid)], grace_s=3.0)


class TorchrunHosts(_Job):
    """`torchrun --nnodes=1:N` on every host; the c10d rendezvous on the first."""

    name = "torchrun"

    def start(self, host: Host) -> None:
        words = [str(torchrun_path()), f"--nnodes=1:{len(self.hosts)}", "--nproc-per-node=1", "--max-restarts=1000"]
        words += [f"--rdzv-id={self.out.name}", "--rdzv-backend=c10d", f"--rdzv-endpoint={self.hosts[0].address}:29400"]
        words += [f"--rdzv-conf={RDZV_CONF}", f"--local-addr={host.address}", str(self.code / "torchrun_job.py")]
        words += [str(self.out), json.dumps(asdict(self.workload)), str(COLLECTIVE_TIMEOUT_S)]
        self._keep(host, words, **TORCHRUN_VARIABLES)


class TorchftHosts(_Job):
    """One replica group per host under a torchrun of its own, and a lighthouse on the first."""

    name = "torchft"

    def __init__(self, hosts: Hosts, folder: Path, code: Path, workload: Any) -> None:
        super().__init__(hosts, folder, code, workload)
        lighthouse = [str(TORCHFT_VENV / "bin" / "torchft_lighthouse"), "--min_replicas", "1"]
        lighthouse += ["--quorum_tick_ms", "100", "--join_timeout_ms", "10000", "--bind", "[::]:29510"]
        log = self.out / "lighthouse.log"
        self._lighthouse = Kept(hosts[0], lighthouse, clean_environment(RUST_BACKTRACE="1"), log)

    def start(self, host: Host) -> None:
        words = [str(TORCHFT_VENV / "bin" / "torchrun"), "--nnodes=1", "--nproc_per_node=1", "--max-restarts=1000"]
        words += [f"--master_addr={host.address}", "--master_port=29600", str(self.code / "torchft_job.py")]
        words += [str(self.out), json.dumps(asdict(self.workload)), host.address]
        words += [str(self.hosts.index(host)), str(len(self.hosts))]
        self._keep(host, words, TORCHFT_LIGHTHOUSE=f"http://{self.hosts[0].address}:29510")

    def end(self) -> None:
        self._lighthouse.stop(grace_s=3.0)
        super().end()


class RayHosts(_Job):
    """`ray start` on every host, elastic Ray Train from a connected driver on the first."""

    name = "raytrain"

    def __init__(self, hosts: Hosts, folder: Path, code: Path, workload: Any, *, least: int = 1) -> None:
        super().__init__(hosts, folder, code, workload)
        self._least = least
        self._temp_dir = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self._variables = {
            "RAY_TMPDIR": str(self._temp_dir),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_DEDUP_LOGS": "0",
        }
        self._address = f"{hosts[0].address}:6379"
        self._driver: subprocess.Popen[str] | None = None
        self._answers: list[dict[str, Any]] = []

    def start(self, host: Host) -> None:
        words = [str(RAY_VENV / "bin" / "ray"), "start", "--block", f"--node-ip-address={host.address}"]
        words += ["--num-cpus=1", "--disable-usage-stats", f"--object-store-memory={200 * 2**20}"]
        if host is self.hosts[0]:
            words += ["--head", "--port=6379", f"--temp-dir={self._temp_dir}", "--include-dashboard=false"]
        else:
            words += [f"--address={self._address}"]
        with contextlib.suppress(FileNotFoundError):
            (self._temp_dir / "ray_current_cluster").unlink()
        self._keep(host, words, **self._variables)
        log = self.out / f"{host.name}.log"
        wait_for(lambda: log.exists() and "runtime started" in log.read_text(), START_LIMIT_S, f"Ray on {host.name}")

    def fit(self) -> None:
        """Starts the driver and the training run."""
        log = (self.out / "driver.log").open("w")
        words = [str(RAY_VENV / "bin" / "python"), str(self.code / "ray_job.py"), self._address, str(self._temp_dir)]
        host = self.hosts[0]
        self._driver = subprocess.Popen(
            host.command(words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=clean_environment(GLOO_SOCKET_IFNAME="eth0", HOME=str(host.folder), **self._variables),
            start_new_session=True,
        )
        assert self._driver.stdout is not None and self._driver.stdin is not None
        if not self._driver.stdout.readline():
            raise RuntimeError(f"the Ray driver ended:\n{self.tail()}")
        order = {"workload": asdict(self.workload), "workers": [self._least, len(self.hosts)], "out": str(self.out)}
        order |= {"name": self.out.name, "timeout_s": COLLECTIVE_TIMEOUT_S, "look_every_s": RAY_LOOKS_EVERY_S}
        self._driver.stdin.write(json.dumps(order) + "\n")
        self._driver.stdin.flush()

    def kill_launcher(self, host: Host) -> None:
        """The raylet: `ray start --block` then ends, and is started again. The head's is its one point of failure
        (without an external store), so it is spared."""
        if host is self.hosts[0]:
            for pid in self.worker_pids(host)[:1]:
                os.kill(pid, signal.SIGKILL)
            return
        for pid in host.pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).name() == "raylet":
                    os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        if self._driver is not None:
            end_processes([psutil.Process(self._driver.pid)] if self._driver.poll() is None else [], grace_s=3.0)
        super().end()
        subprocess.run(["rm", "-rf", str(self._temp_dir)], check=False)


@contextlib.contextmanager
def running(job: Any) -> Iterator[Any]:
    """All hosts take part; ended at the end."""
    try:
        for host in job.hosts:
            job.start(host)
        if isinstance(job, RayHosts):
            job.fit()
        yield job
    finally:
        job.end()


def main() -> None:
    began_s = time.monotonic()
    make_venv(TORCHFT_VENV, TORCHFT_PACKAGES)
    say(f"{time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
