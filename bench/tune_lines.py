"""[tune-lines] From a plain training function to an elastic, resumable study: how many lines of the file change, with
ours and with the peers' documented ways. All files are run.
"""

import difflib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.cluster import Cluster
from bench.harness import Goal, Row, row, say
from bench.peers import RAY_VENV, clean_environment, copy_jobs, require_peers, scratch

LIMIT_S = 300.0
PEERS = {
    "Ray Tune (checkpoints, restarts, restore)": ("lines_ray.py", RAY_VENV / "bin" / "python"),
    "Optuna (journal file, pruning, files of its own)": ("lines_optuna.py", Path(sys.executable)),
}


def run() -> list[Row]:
    require_peers()
    with scratch("lines") as folder:
        code = copy_jobs(folder)
        plain = (code / "lines_plain.py").read_text().splitlines()
        changed = {
            name: num_changed(plain, (code / file).read_text().splitlines()) for name, (file, _) in PEERS.items()
        }
        ours = num_changed(plain, (code / "lines_racimo.py").read_text().splitlines())
        execute([sys.executable, str(code / "lines_plain.py")], code, clean_environment())
        study(folder, code)
        for name, (file, python) in PEERS.items():
            say(f"  {name}")
            execute([str(python), str(code / file)], code, clean_environment(RAY_USAGE_STATS_ENABLED="0"))
    return [
        row(
            "changed lines, from a plain training function to an elastic, resumable study",
            ours,
            "lines",
            Goal("<=", 5),
            peers=dict(changed),
            note="a line that is replaced counts once; blank lines count. Neither peer's study grows and shrinks"
            " with the machines: their number of workers is fixed",
        )
    ]


def num_changed(before: Sequence[str], after: Sequence[str]) -> int:
    """Lines that were added, taken away or replaced."""
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in changes if kind != "equal")


def study(folder: Path, code: Path) -> None:
    """Ours: submitted by the file itself."""
    with Cluster(folder, slots=2) as cluster:
        execute([sys.executable, str(code / "lines_racimo.py")], code, cluster.environment)
        (submitted,) = cluster.client.runs(all=True)
        done = cluster.client.wait(submitted.id, timeout_s=LIMIT_S)
        trials = cluster.client.trials(submitted.id)
        if done.status != "succeeded" or trials.num_trials != 20:
            raise RuntimeError(f"{done.id} is {done.status} with {trials.counts}: {done.failure or done.reason}")


def execute(words: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(words, cwd=folder, env=environment, text=True, capture_output=True, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
