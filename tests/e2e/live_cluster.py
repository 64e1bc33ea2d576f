"""A real cluster in a folder of its own, driven through the command line and the client."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from racimo.client import Client
from racimo.client.discovery import connect
from racimo.spec.home import Home

SCRIPTS = Path(__file__).parent / "scripts"
WAIT_S = 60.0


class LiveCluster:
    """One cluster of this test's own, with `slots` CPU slots."""

    def __init__(self, root: Path, slots: int) -> None:
        self.home = Home(root)
        self.environment = os.environ | {"RACIMO_HOME": str(root), "NO_COLOR": "1"}
        self.environment.pop("RACIMO_ADDRESS", None)
        self.slots = slots

    def cli(self, *words: str, cwd: Path | None = None, timeout_s: float = WAIT_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "racimo.cli.main", *words],
            env=self.environment,
            cwd=cwd or SCRIPTS,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )

    def up(self) -> None:
        done = self.cli("up", "--slots", str(self.slots))
        assert done.returncode == 0, done.stderr

    def client(self) -> Client:
        return connect(self.home, start=False)

    def pids(self) -> dict[int, str]:
        """Every live process that belongs to this cluster, by its environment or command line."""
        root = os.fsencode(self.home.root)
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                command = (entry / "cmdline").read_bytes()
                belongs = root in command or b"RACIMO_HOME=" + root in (entry / "environ").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if belongs and command:
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
        return found

    def service_pid(self, role: str) -> int:
        return int(json.loads((self.home.processes_dir / f"{role}.json").read_bytes())["pid"])

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def kill_everything(self) -> None:
        """All at once: each process is frozen first, so none of them sees another one die."""
        frozen: set[int] = set()
        while fresh := set(self.pids()) - frozen:
            for pid in fresh:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            frozen |= fresh
        for pid in frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Waits for something that another process does and that announces itself in no other way."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout_s:.0f} s still not: {what}"
        time.sleep(0.02)


def submit(cluster: LiveCluster, *words: str) -> str:
    done = cluster.cli("train", "tiny.py:train", "--detach", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[0]


def final_hash(cluster: LiveCluster, run: str) -> str:
    view = cluster.client().wait(run, timeout_s=60)
    assert view.status == "succeeded", view.failure
    return (cluster.home.output_dir(run) / "hash.txt").read_text()


def steps_of(cluster: LiveCluster, run: str) -> list[dict]:
    files = (cluster.home.node_dir / "workers" / run).rglob("steps.jsonl")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def live_worker_pids(cluster: LiveCluster, run: str) -> list[int]:
    return [worker.pid for worker in cluster.client().run(run).workers if worker.status == "ready" and worker.pid]


def committed(cluster: LiveCluster, run: str) -> int:
    progress = cluster.client().run(run).progress
    return progress.step if progress else 0


def events(cluster: LiveCluster, run: str) -> list[dict]:
    return [json.loads(line) for line in cluster.cli("events", run, "-o", "json").stdout.splitlines()]
