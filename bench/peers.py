"""The systems we are measured against, set up as their own documentation advises, on this machine.

torchrun comes from the same virtual environment as Racimo. Ray Train lives in one of its own, `.venvs/ray`, which
`python -m bench.peers` makes.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from bench.commits import Commit, read_commits, wait_for
from bench.harness import say

ROOT = Path(__file__).parent.parent
RAY_VENV = ROOT / ".venvs" / "ray"
RAY_PACKAGES = ("ray[train]==2.60.0", "torch==2.13.0")
TORCHRUN_RESTARTS = 1_000
TORCHRUN_VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""In its favour: by default (torch 2.13) restarted workers may read the addresses of dead ones from the rendezvous's
store, which it keeps, and then wait for ever in Gloo's connectFullMesh (seen here in one kill out of three)."""
START_LIMIT_S = 120.0
END_LIMIT_S = 10.0


class PeerMissing(RuntimeError):
    """A peer is not installed; the sentence says what to type."""


def require_peers() -> None:
    """Raises `PeerMissing` unless both peers can be run: a comparison is never left out in silence."""
    if not (RAY_VENV / ".ready").exists():
        raise PeerMissing(f"Ray Train is not installed in {RAY_VENV}; run: {sys.executable} -m bench.peers")
    if not torchrun_path().exists():
        raise PeerMissing(f"torchrun is not in {torchrun_path().parent}; run: make setup")


def torchrun_path() -> Path:
    return Path(sys.executable).parent / "torchrun"


def make_venv(folder: Path, packages: tuple[str, ...]) -> None:
    """A virtual environment of a peer's own; does nothing where it is ready."""
    ready = folder / ".ready"
    wanted = "\n".join(packages)
    if ready.exists() and ready.read_text() == wanted:
        say(f"{folder} is ready")
        return
    say(f"making {folder} with {' '.join(packages)}")
    if not (folder / "bin" / "pip").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", *packages], check=True)
    ready.write_text(wanted)


def make_ray_venv() -> None:
    """Makes `.venvs/ray` (some 1.5 GB, a minute or two)."""
    make_venv(RAY_VENV, RAY_PACKAGES)


def copy_jobs(folder: Path) -> Path:
    """A folder with the model, the data and every job file: what a user's project would be."""
    code = folder / "code"
    code.mkdir(parents=True)
    for source in [*ROOT.glob("examples/gpt/*.py"), *ROOT.glob("bench/jobs/*.py")]:
        shutil.copy(source, code / source.name)
    return code


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A temporary folder with a short path (Unix sockets are limited to 108 bytes)."""
    folder = Path(tempfile.mkdtemp(prefix=f"rb-{name[:4]}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def end_processes(processes: list[psutil.Process], grace_s: float = END_LIMIT_S) -> None:
    """SIGTERM to each, SIGKILL to what is left after `grace_s`; psutil knows a reused pid by its start time."""
    for how in ("terminate", "kill"):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(process, how)()
        _, processes = psutil.wait_procs(processes, timeout=grace_s)


def descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def clean_environment(**extra: str) -> dict[str, str]:
    """Ours without what Racimo or an outer torchrun may have put there."""
    dropped = ("RACIMO_", "TORCHELASTIC_", "RAY_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | extra


class TorchrunJob:
    """One job under torchrun from start to `end()`. `start_s` is the moment before the command is started."""

    def __init__(self, folder: Path, code: Path, workload: Any, workers: int) -> None:
        self.out = Path(tempfile.mkdtemp(prefix="torchrun-", dir=folder))
        endpoint = f"127.0.0.1:{free_port()}"
        command = [str(torchrun_path()), "--nnodes=1", f"--nproc-per-node={workers}"]
        command += [f"--max-restarts={TORCHRUN_RESTARTS}", f"--rdzv-id={self.out.name}", "--rdzv-backend=c10d"]
        command += [f"--rdzv-endpoint={endpoint}", str(code / "torchrun_job.py")]
        command += [str(self.out), json.dumps(asdict(workload))]
        self._log = (self.out / "log.txt").open("w")
        self.start_s = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=clean_environment(**TORCHRUN_VARIABLES),
            start_new_session=True,
        )

    def commits(self) -> list[Commit]:
        return read_commits(self.out.glob("steps-*.jsonl"))

    def alive(self) -> bool:
        return self._process.poll() is None

    def worker_pids(self) -> list[int]:
        """Live worker processes, in the order in which they were started."""
        return _live_pids(self.out)

    def tail(self) -> str:
        """The last lines it wrote, for a person who wonders."""
        return _tail(self.out / "log.txt")

    def wait(self, limit_s: float) -> None:
        try:
            code = self._process.wait(limit_s)
        finally:
            self.end()
        if code:
            raise RuntimeError(f"torchrun ended with {code}:\n{_tail(self.out / 'log.txt')}")

    def end(self) -> None:
        workers = descendants(self._process.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            workers.append(psutil.Process(self._process.pid))
        end_processes(workers)
        self._log.close()


class RayCluster:
    """A running Ray (`ray start --head --block`) with its own temporary folder and ports, and a connected driver."""

    def __init__(self, folder: Path, code: Path, cpus: int) -> None:
        self.temp_dir = folder / "ray"
        self.temp_dir.mkdir()
        self._environment = clean_environment(
            RAY_TMPDIR=str(self.temp_dir), RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0", RAY_DEDUP_LOGS="0"
        )
        port = free_port()
        command = [str(RAY_VENV / "bin" / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
        command += [f"--port={port}", f"--num-cpus={cpus}", f"--temp-dir={self.temp_dir}", "--include-dashboard=false"]
        command += ["--disable-usage-stats", "--min-worker-port=0"]
        command += ["--max-worker-port=0", f"--dashboard-agent-listen-port={free_port()}"]
        command += [f"--object-store-memory={500 * 2**20}"]
        self._logs = [(folder / f"ray-{name}.txt").open("w") for name in ("head", "driver")]
        started_s = time.monotonic()
        self._head = subprocess.Popen(
            command, stdout=self._logs[0], stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
        )
        self._ours: dict[int, psutil.Process] = {}
        self._driver: subprocess.Popen[str] | None = None
        self.address = f"127.0.0.1:{port}"
        self.folder = folder
        try:
            self._wait_until_up(port)
            self.up_s = time.monotonic() - started_s
            self._start_driver(code)
        except BaseException:
            self.end()
            raise

    def _wait_until_up(self, port: int) -> None:
        def answers() -> bool:
            if self._head.poll() is not None:
                raise RuntimeError(f"ray start ended:\n{_tail(self.folder / 'ray-head.txt')}")
            return "Ray runtime started" in (self.folder / "ray-head.txt").read_text()

        wait_for(answers, START_LIMIT_S, "a running Ray")

    def _start_driver(self, code: Path) -> None:
        self._driver = subprocess.Popen(
            [str(RAY_VENV / "bin" / "python"), str(code / "ray_job.py"), self.address, str(self.temp_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._logs[1],
            text=True,
            env=self._environment,
            start_new_session=True,
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._driver is not None and self._driver.stdout is not None
        line = self._driver.stdout.readline()
        if not line:
            raise RuntimeError(f"the Ray driver ended:\n{_tail(self.folder / 'ray-driver.txt')}")
        answer: dict[str, Any] = json.loads(line)
        if not answer.get("ok", True):
            raise RuntimeError(f"{answer['error']}\n{_tail(self.folder / 'ray-driver.txt')}")
        return answer

    def submit(self, workload: Any, workers: int) -> "RayJob":
        assert self._driver is not None and self._driver.stdin is not None
        out = Path(tempfile.mkdtemp(prefix="raytrain-", dir=self.folder))
        order = {"workload": asdict(workload), "workers": workers, "out": str(out), "name": out.name}
        job = RayJob(self, out, time.monotonic())
        self._driver.stdin.write(json.dumps(order) + "\n")
        self._driver.stdin.flush()
        return job

    def processes(self) -> list[psutil.Process]:
        """Everything that this Ray consists of: children of ours, and what names our temporary folder."""
        for pid in (self._head.pid, self._driver.pid if self._driver else 0):
            for process in ([psutil.Process(pid)] if pid and psutil.pid_exists(pid) else []) + descendants(pid):
                self._ours[process.pid] = process
        for process in psutil.process_iter(["cmdline"]):
            if any(str(self.temp_dir) in word for word in process.info["cmdline"] or []):
                self._ours[process.pid] = process
                self._ours.update({child.pid: child for child in descendants(process.pid)})
        return [process for process in self._ours.values() if process.is_running()]

    def end(self) -> None:
        end_processes(self.processes(), grace_s=3.0)
        for log in self._logs:
            log.close()


class RayJob:
    def __init__(self, cluster: RayCluster, out: Path, start_s: float) -> None:
        self._cluster, self.out, self.start_s = cluster, out, start_s

    def commits(self) -> list[Commit]:
        return read_commits(self.out.glob("steps-*.jsonl"))

    def worker_pids(self) -> list[int]:
        return _live_pids(self.out)

    def tail(self) -> str:
        return _tail(self._cluster.folder / "ray-driver.txt")

    def wait(self, limit_s: float) -> None:
        with _alarm(limit_s, "the end of fit()"):
            self._cluster._answer()


@contextlib.contextmanager
def _alarm(limit_s: float, what: str) -> Iterator[None]:
    """Bounds a blocking read in the main thread."""

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"{what} did not come within {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _live_pids(out: Path) -> list[int]:
    files = sorted(out.glob("steps-*.jsonl"), key=lambda path: path.stat().st_ctime_ns)
    pids = [int(path.stem.rsplit("-", 1)[1]) for path in files]
    return [pid for pid in dict.fromkeys(pids) if _running(pid)]


def _running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _tail(path: Path, lines: int = 30) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def resident_bytes(pids: Mapping[int, Any] | list[int]) -> tuple[int, int]:
    """(proportional, private) bytes of the processes together: PSS, which splits shared pages, and USS."""
    proportional = private = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            usage = psutil.Process(pid).memory_full_info()
            proportional, private = proportional + usage.pss, private + usage.uss
    return proportional, private


if __name__ == "__main__":
    make_ray_venv()
