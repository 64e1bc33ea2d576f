"""[trials] Trials that do nothing, through real worker processes, every result durable; 10,000 reports of one trial.

The peers run fewer trials where theirs take long; what is compared is trials a second, from the call that tunes to its
end, with everything imported and the cluster running.
"""

import subprocess
import time
from pathlib import Path
from types import TracebackType

from bench.cluster import Cluster
from bench.commits import wait_for
from bench.harness import Deadline, Goal, Row, alternate, quick, ratios, row
from bench.peers import clean_environment, copy_jobs, descendants, end_processes, scratch
from bench.tune_peers import tune_python
from racimo.client import Client

LIMIT_S = 300.0
WORKERS = 2
REPORTS = 10_000
SPACE = {"x": "0.0..1.0"}


def run() -> list[Row]:
    python = tune_python()
    deadline = Deadline(900.0 if not quick() else None)
    trials, optuna_trials, few = (200, 50, 4) if quick() else (2_000, 2_000, 24)
    with scratch("trials") as folder:
        code = copy_jobs(folder)
        with (
            Cluster(folder, slots=WORKERS) as cluster,
            Driver(python, code / "tune_ray.py", folder / "rt") as ray,
            Driver(python, code / "tune_syne.py", folder / "syne") as syne,
        ):
            tune(cluster.client, code, 4)  # warm: files sent, pages cached
            ray.ask("2")
            cases = {
                "racimo": lambda: trials / tune(cluster.client, code, trials),
                "optuna": lambda: optuna_trials / optuna_s(python, code, folder, optuna_trials),
                "ray": lambda: few / float(ray.ask(str(few))),
                "syne": lambda: few / float(syne.ask(str(few))),
            }
            measured = alternate(cases, 1 if quick() else 5, deadline.share(0.8))
            reports = [reports_a_second(cluster, code) for _ in range(1 if quick() else 5)]
    ours, optuna, ray_rate, syne_rate = (measured[name] for name in ("racimo", "optuna", "ray", "syne"))
    peers = {
        f"Ray Tune, reused actors, {few} trials": ray_rate,
        f"Optuna, journal file, two processes, {optuna_trials} trials": optuna,
        f"Syne Tune, a process for each trial, {few} trials": syne_rate,
    }
    return [
        row(f"trials a second, {trials} that do nothing, {WORKERS} workers", ours, "1/s", peers=peers),
        row("times as many as Ray Tune", ratios(ours, ray_rate), "x", Goal(">=", 20)),
        row("times as many as Optuna", ratios(ours, optuna), "x", Goal(">=", 1)),
        row("times as many as Syne Tune", ratios(ours, syne_rate), "x"),
        row(f"durable reports a second, {REPORTS} by one trial", reports, "1/s", Goal(">=", 5_000)),
    ]


def tune(client: Client, code: Path, trials: int) -> float:
    """Seconds from `tune` to the study's end."""
    began_s = time.monotonic()
    view = client.tune(
        "tune_noop.py:train",
        root=code,
        space=SPACE,
        metric="loss",
        trials=trials,
        proposer="random",
        scheduler="none",
    )
    view = client.wait(view.id, timeout_s=LIMIT_S)
    took_s = time.monotonic() - began_s
    counts = client.trials(view.id).counts
    if view.status != "succeeded" or counts != {"finished": trials}:
        raise RuntimeError(f"{view.id} is {view.status}, {counts}: {view.failure or view.reason}")
    return took_s


def optuna_s(python: Path, code: Path, folder: Path, trials: int) -> float:
    """From the first process's first trial to the last one's end; both have imported everything before."""
    journal = folder / f"optuna-{time.monotonic_ns()}.log"
    drivers = [Driver(python, code / "tune_optuna.py", journal, str(trials // 2), str(seed)) for seed in range(WORKERS)]
    try:
        for driver in drivers:
            driver.begin("go")
        spans = [[float(word) for word in driver.answer().split()] for driver in drivers]
    finally:
        for driver in drivers:
            driver.end()
    return max(span[1] for span in spans) - min(span[0] for span in spans)


def reports_a_second(cluster: Cluster, code: Path) -> float:
    """From the first report until all are in the run's file on its node; this process looks every few milliseconds."""
    view = cluster.client.tune(
        "tune_noop.py:report",
        root=code,
        space=SPACE,
        metric="loss",
        trials=1,
        proposer="random",
        scheduler="none",
        config={"reports": REPORTS},
    )
    path = cluster.home / "node" / "runs" / view.id / "reports.jsonl"
    wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= REPORTS, LIMIT_S, "all reports")
    end_s = time.monotonic()
    done = cluster.client.wait(view.id, timeout_s=LIMIT_S)
    began_s = float((Path(done.output_dir) / "told.txt").read_text().split()[0])
    return REPORTS / (end_s - began_s)


class Driver:
    """A peer's process that has everything imported, reads orders and answers each with a line."""

    def __init__(self, python: Path, script: Path, folder: Path, *words: str) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._log = folder.with_name(f"{folder.name}-{script.stem}-{time.monotonic_ns()}.txt").open("w+")
        environment = clean_environment(RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")
        self._process = subprocess.Popen(
            [str(python), str(script), str(folder), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            cwd=script.parent,
            start_new_session=True,
        )
        self.answer()

    def begin(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"the peer ended:\n{self._log.read()[-3000:]}")
        return line.strip()

    def ask(self, order: str) -> str:
        self.begin(order)
        return self.answer()

    def end(self) -> None:
        """Its children first: a Ray's own processes end with their driver, those of a dead one would stay."""
        processes = descendants(self._process.pid)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end_processes([process for process in processes if process.is_running()], grace_s=3.0)
        self._log.close()

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()
