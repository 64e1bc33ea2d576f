"""Racimo's side: a cluster in a temporary home, and one training run on it, seen through the public SDK and command.

What is read besides is what `docs/architecture.md` says of files: workers' `steps.jsonl` and `pid.json`, services'
`processes/NAME.json`.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from bench.commits import Commit, read_commits, wait_for
from bench.peers import clean_environment, end_processes
from racimo.client import Client
from racimo.control.views import RunView
from racimo.spec.run import CheckpointSpec, RunSpec
from racimo.state.nouns import ENDED

COMMAND_LIMIT_S = 60.0
WARM_LIMIT_S = 90.0
HUNG_AFTER = "60s"
RUNNING_EVERY_POLLS = 50
"""How often, while waiting for commits, the cluster is asked whether the run still runs."""


class Cluster:
    """A cluster of `slots` CPU slots with a home of its own below `folder`; taken down at the end of the `with`."""

    def __init__(self, folder: Path, slots: int, price: float = 0.0) -> None:
        self.home = folder / "home"
        self._slots, self._price = slots, price
        self.environment = clean_environment(RACIMO_HOME=str(self.home), NO_COLOR="1")
        self.client = Client(home=self.home, may_start=False, say=lambda _text: None)

    def __enter__(self) -> "Cluster":
        self.command("up", "--slots", str(self._slots), "--price", str(self._price))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.client.close()
        try:
            self.command("down")
        finally:
            end_processes(self.processes())

    def command(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`racimo WORDS` as a user types it; raises with its own words if it fails."""
        done = subprocess.run(
            [racimo_path(), *words], env=self.environment, text=True, capture_output=True, timeout=COMMAND_LIMIT_S
        )
        if check and done.returncode:
            raise RuntimeError(f"racimo {' '.join(words)} ended with {done.returncode}:\n{done.stderr}{done.stdout}")
        return done

    def submit(
        self,
        code: Path,
        workload: Any,
        workers: str | int,
        *,
        kills: list[dict[str, Any]] | None = None,
        name: str = "",
    ) -> "RacimoJob":
        """The workload through `run.steps`; `kills` is for `jobs/faults.py`."""
        spec = RunSpec(
            name=name,
            train="racimo_job.py:train",
            config={"workload": asdict(workload), "kills": kills or []},
            workers=workers,
            hang_after=HUNG_AFTER,
            checkpoint=CheckpointSpec(every=f"{workload.checkpoint_every} steps"),
        )
        start_s = time.monotonic()
        view = self.client.submit(spec, root=code)
        return RacimoJob(self, view, start_s)

    def warm_up(self, code: Path, workload: Any, workers: str | int) -> None:
        """One run of the workload, so that torch is imported, files are sent and pages are cached."""
        self.submit(code, workload, workers).wait(WARM_LIMIT_S)

    def services(self) -> dict[str, int]:
        """Service processes that are alive: name to pid."""
        found = {}
        for path in sorted(self.home.joinpath("processes").glob("*.json")):
            record = json.loads(path.read_bytes())
            if _is(record["pid"], record["start_ticks"]):
                found[path.stem] = record["pid"]
        return found

    def processes(self) -> list[psutil.Process]:
        """Every live process that belongs to this home, by its command line or its environment."""
        home = str(self.home)
        found = []
        for process in psutil.process_iter():
            try:
                words = [*process.cmdline(), *process.environ().values()]
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
            if process.pid != os.getpid() and any(home in word for word in words):
                found.append(process)
        return found


class RacimoJob:
    """A training run from submit on. `start_s`: the moment before `submit`."""

    def __init__(self, cluster: Cluster, view: RunView, start_s: float) -> None:
        self._cluster, self.id, self.start_s = cluster, view.id, start_s
        self.folder = cluster.home / "node" / "workers" / view.id
        self.out = Path(view.output_dir) if view.output_dir else cluster.home / "outputs" / view.id

    def commits(self) -> list[Commit]:
        return read_commits(self.folder.glob("*/*/steps.jsonl"))

    def live_workers(self) -> dict[Path, int]:
        """Worker folder to pid of those that live, oldest first."""
        found: dict[Path, tuple[int, int]] = {}
        for path in self.folder.glob("*/*/pid.json"):
            record = json.loads(path.read_bytes())
            if _is(record["pid"], record["start_ticks"]):
                found[path.parent] = (record["start_ticks"], record["pid"])
        return {folder: pid for folder, (_, pid) in sorted(found.items(), key=lambda item: item[1])}

    def worker_pids(self) -> list[int]:
        return list(self.live_workers().values())

    def whole(self, workers: int) -> bool:
        """`workers` of them live and take part in the newest step, or the one before: no two are further apart."""
        newest = {}
        for folder in self.live_workers():
            if (folder / "steps.jsonl").exists() and (commits := read_commits([folder / "steps.jsonl"])):
                newest[folder] = commits[-1].step
        return len(newest) == workers and max(newest.values()) - min(newest.values()) <= 1

    def kill_one(self, random_source: random.Random) -> float:
        """SIGKILL to one live worker; the moment of it."""
        pid = random_source.choice(self.worker_pids())
        moment_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return moment_s

    def wait(self, limit_s: float) -> RunView:
        """Raises unless the run succeeded within `limit_s`."""
        view = self._cluster.client.wait(self.id, timeout_s=limit_s)
        if view.status != "succeeded":
            raise RuntimeError(f"run {self.id} is {view.status} after {limit_s:.0f} s: {view.failure or view.reason}")
        return view

    def stop(self) -> None:
        self._cluster.client.stop(self.id)
        self._cluster.client.wait(self.id, timeout_s=COMMAND_LIMIT_S)

    def running(self) -> bool:
        """False once it has succeeded; raises if it ended otherwise."""
        view = self._cluster.client.run(self.id)
        if view.status in ENDED and view.status != "succeeded":
            raise RuntimeError(f"run {self.id} is {view.status}: {view.failure or view.reason}")
        return view.status not in ENDED

    def output(self, name: str) -> str:
        return self.out.joinpath(name).read_text()

    def wait_commits(self, steps: int, limit_s: float) -> None:
        """Until `steps` steps are committed; raises at once if the run ends badly."""

        polls = 0

        def reached() -> bool:
            nonlocal polls
            polls += 1
            commits = self.commits()
            if commits and max(commit.step for commit in commits) >= steps:
                return True
            return polls % RUNNING_EVERY_POLLS == 0 and not self.running()

        wait_for(reached, limit_s, f"step {steps} of {self.id}")


def racimo_path() -> str:
    return str(Path(sys.executable).parent / "racimo")


def _is(pid: int, start_ticks: int) -> bool:
    """Whether `pid` is still the process that began at `start_ticks`, and no zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] not in "ZX" and int(fields[19]) == start_ticks


def memory_by_role(cluster: Cluster) -> Mapping[str, float]:
    """Resident megabytes of every process, as the cluster itself tells."""
    return {
        f"{usage.role} ({usage.pid})": round(usage.resident_bytes / 1e6, 1)
        for usage in cluster.client.cluster().processes
    }
