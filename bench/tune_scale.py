"""[tune-scale] 100,000 trials: what the control process's core keeps of them, with a real journal, and how long the
proposer takes for a point when there are that many.

It plays in a process of its own, so that nothing else is in its memory: `python -m bench.tune_scale FOLDER TRIALS`.
"""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.harness import Goal, Row, percentile, quick, row
from bench.peers import ROOT, clean_environment, scratch
from racimo.act.journal_file import SqliteJournal
from racimo.agent.propose_protocol import Proposed, ProposerAsk
from racimo.control.core import Core
from racimo.control.effects import Slice, Start
from racimo.decide.tune.draw import uniform
from racimo.decide.tune.known import outcome_of
from racimo.spec.proposer import NUM_BEST, window_from
from racimo.spec.run import RunSpec
from racimo.spec.study import StudySpec
from racimo.state import events as ev
from racimo.state.nouns import Device, Node, parse_worker_id
from racimo.state.trials import Grant, Proposal, Result
from racimo.worker.tune.propose_answers import Answers

TRIALS, QUICK_TRIALS = 100_000, 5_000
LIMIT_S = 1_800.0
LANES = 8
ASKS, QUICK_ASKS = 1_000, 100
ROUNDS = 9
PROPOSER = "gp"
SPACE = {f"x{axis}": "0.0..1.0" for axis in range(6)} | {"kind": ["a", "b", "c"]}
"""Six numbers and a choice: what an ordinary study has."""


def run() -> list[Row]:
    trials, asks = (QUICK_TRIALS, QUICK_ASKS) if quick() else (TRIALS, ASKS)
    with scratch("scale") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "bench.tune_scale", str(folder), str(trials), str(asks)],
            text=True,
            capture_output=True,
            timeout=LIMIT_S,
            cwd=ROOT,
            env=clean_environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"),
        )
    if done.returncode:
        raise RuntimeError(f"it ended with {done.returncode}:\n{done.stderr[-3000:]}")
    told = json.loads(done.stdout)
    return [
        row(
            f"memory of the core above idle, {trials} trials of 8 values with curves",
            told["memory_mb"],
            "MB",
            Goal("<=", 500),
            note=f"journal {told['journal_mb']:.0f} MB; opened again in {told['reopened_s']:.1f} s",
        ),
        row(f"`ask` with changes told, {trials} trials, {PROPOSER}, p99", told["ask_ms"]["p99"], "ms", Goal("<=", 10),
            note=f"p50 {told['ask_ms']['p50']:.2f} ms, most {told['ask_ms']['max']:.2f} ms"),
        row("trials a second through the core, each slice journalled and synced", told["trials_a_second"], "1/s"),
        row("decisions after a result, p99, in the last tenth of the study", told["tick_ms"]["p99"], "ms",
            note=f"p50 {told['tick_ms']['p50']:.2f} ms; in the first tenth p50 {told['first_tick_ms']['p50']:.2f} ms"),
    ]  # fmt: skip


class _Now:
    """The cluster's clock, in which a round takes a second."""

    def __init__(self) -> None:
        self.at_s = 100.0

    def now_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return 1_700_000_000.0 + self.at_s


class _Stage:
    """A core, and workers that end every slice at once."""

    def __init__(self, path: Path, trials: int) -> None:
        self.path, self.clock = path, _Now()
        self.core = Core(SqliteJournal(path), self.clock)
        self.core.node_joined(Node(id="n1", host="here", devices=tuple(Device(index) for index in range(LANES))))
        self.turn()
        self.idle_bytes = resident_bytes()
        terms = StudySpec(space=SPACE, metric="loss", trials=trials, rounds=ROUNDS, first_round=1, proposer=PROPOSER)
        self.run = self.core.submit(RunSpec(tune="t.py:train", study=terms, workers=1), "request").id
        self.tick_ms: list[float] = []
        self._draws = 0

    def turn(self) -> list[Grant]:
        """What is granted; workers that are to start are ready at once."""
        grants: list[Grant] = []
        again = True
        while again:
            self.core.tick()
            self.core.commit()
            self.core.take_records()
            again = False
            for effect in self.core.take_effects():
                if isinstance(effect, Slice):
                    grants.append(effect.order.grant)
                elif isinstance(effect, Start):
                    again = True
                    self._ready(effect.worker)
            wanted = self.core.wants.get(getattr(self, "run", ""), 0)
            if wanted:
                again = True
                self._propose(wanted)
        return grants

    def _ready(self, worker: str) -> None:
        run, attempt, index = parse_worker_id(worker)
        self.core.agent_event(ev.WorkerStarted(run=run, attempt=attempt, index=index, pid=1000 + index))
        ready = ev.WorkerReady(run=run, attempt=attempt, index=index, address="", micro_shards=10_000, numerics="")
        self.core.agent_event(ready)

    def _propose(self, count: int) -> None:
        """Random points in the place of learnt ones: they cost the core the same."""
        study = self.core.state.studies[self.run]
        proposals = []
        for _ in range(count):
            units = [uniform("bench", self._draws, axis) for axis in range(len(SPACE))]
            self._draws += 1
            proposals.append(Proposal(values=study.space.at(units), by=PROPOSER))
        proposed = Proposed(number=0, proposals=tuple(proposals))
        self.core.take_proposals(self.run, study.terms, len(study.trials), count, proposed)

    def play(self) -> None:
        grants = self.turn()
        while grants:
            self.clock.at_s += 1.0
            for grant in grants:
                self.core.agent_event(self._ended(grant))
            began_s = time.perf_counter()
            grants = self.turn()
            self.tick_ms.append(1e3 * (time.perf_counter() - began_s) / LANES)

    def _ended(self, grant: Grant) -> ev.SliceEnded:
        trial = self.core.state.studies[self.run].trials[grant.trial]
        curve = tuple((number, loss(grant.trial, number)) for number in range(trial.rounds + 1, grant.until + 1))
        result = Result(
            outcome="reached",
            rounds=grant.until,
            step=grant.until,
            metrics={"loss": curve[-1][1]},
            curve=curve,
            saved=grant.until,
            worked_s=float(len(curve)),
        )
        attempt = self.core.state.runs[self.run].attempt
        return ev.SliceEnded(run=self.run, attempt=attempt, index=grant.worker, number=grant.number, result=result)


def loss(trial: int, rounds: int) -> float:
    return uniform("loss", trial) + 1.0 / rounds


def ask_ms(stage: _Stage, asks: int) -> list[float]:
    """One point after the other, as they are asked for at the study's end: each time a few trials have changed."""
    study = stage.core.state.studies[stage.run]
    answers = Answers(Path(), "bench")
    first = len(study.trials)
    newest_from = window_from(first)
    best = tuple(sorted(number for _, number in study.ranking[:NUM_BEST] if number < newest_from))
    window = sorted({*best, *range(newest_from, first)})
    outcomes = tuple(outcome_of(study.trials[number], study.levels) for number in window)
    took = []
    for number in range(asks + 1):
        changed = outcomes if number == 0 else tuple(outcomes[(number * 7 + one) % len(outcomes)] for one in range(3))
        ask = ProposerAsk(
            number=number,
            first=first,
            count=1,
            seed=number,
            newest_from=newest_from,
            best=best,
            outcomes=changed,
            terms=study.terms if number == 0 else None,
        )
        began_s = time.perf_counter()
        answer = answers.answer(ask)
        took.append(1e3 * (time.perf_counter() - began_s))
        assert answer.proposals and answer.failure is None, answer
    return took[1:]  # the first one imports, and is told everything


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    return {"p50": percentile(values, 50), "p99": percentile(values, 99), "max": max(values)}


def main(folder: Path, trials: int, asks: int) -> None:
    stage = _Stage(folder / "journal", trials)
    began_s = time.perf_counter()
    stage.play()
    took_s = time.perf_counter() - began_s
    study = stage.core.state.studies[stage.run]
    assert len(study.trials) == trials, (len(study.trials), stage.core.state.runs[stage.run])
    memory_bytes = resident_bytes() - stage.idle_bytes
    told = ask_ms(stage, asks)
    tenth = max(1, len(stage.tick_ms) // 10)
    stage.core.store.close()
    began_s = time.perf_counter()
    Core(SqliteJournal(stage.path), stage.clock)
    found = {
        "memory_mb": memory_bytes / 1e6,
        "journal_mb": sum(one.stat().st_size for one in folder.iterdir() if one.is_file()) / 1e6,
        "reopened_s": time.perf_counter() - began_s,
        "ask_ms": quantiles(told),
        "trials_a_second": trials / took_s,
        "tick_ms": quantiles(stage.tick_ms[-tenth:]),
        "first_tick_ms": quantiles(stage.tick_ms[:tenth]),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
