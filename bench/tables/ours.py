"""Racimo in simulated time: its own state, decisions and proposer, driven as the control process drives them."""

import math
from pathlib import Path
from typing import Any

from bench.tables.clock import Move
from bench.tables.objectives import Objective
from racimo.agent.propose_protocol import ProposerAsk
from racimo.decide.tune.accept import accept
from racimo.decide.tune.known import outcome_of
from racimo.decide.tune.lanes import Lanes
from racimo.spec.proposer import MAX_COUNT, NUM_BEST, window_from
from racimo.spec.run import RunSpec
from racimo.spec.study import PURE_PROPOSERS, StudySpec
from racimo.state import events as ev
from racimo.state.nouns import Run, Worker
from racimo.state.study import Study
from racimo.state.trials import Grant, Result, SliceOutcome
from racimo.worker.tune.propose_answers import Answers

RUN = "simulated"
MOST_TRIALS = 100_000
MAX_ROUNDS_OF_DECISIONS = 1_000
SECONDS_COUNT_AS = 1_000.0
"""So that no trial counts as so short that points are asked for ahead of need: here an answer takes no time."""


class Racimo:
    """`proposer`, `scheduler` and `terms` as in a study; no `proposing` for those that the decision draws itself."""

    def __init__(
        self, objective: Objective, workers: int, seed: int, proposer: str, scheduler: str = "asha", **terms: Any
    ) -> None:
        space = {
            one.name: {"kind": one.kind, "low": float(one.low), "high": float(one.high), "log": one.log}
            for one in objective.space
        }
        study = StudySpec(
            space=space,
            metric="loss",
            trials=MOST_TRIALS,
            proposer=proposer,
            scheduler=scheduler,
            rounds=objective.rounds,
            **terms,
        )
        spec = RunSpec(tune="simulated.py:train", study=study, seed=seed, workers=1)
        lanes = {
            index: Worker(
                index=index, attempt=1, node="n1", devices=(index,), rank=index, status="ready", ready_at_s=1.0
            )
            for index in range(workers)
        }
        self._run = Run(id=RUN, spec=spec, order=1, status="running", attempt=1, workers=lanes, most=workers)
        self.study = Study(study)
        self._proposing = Proposing(seed) if proposer not in PURE_PROPOSERS else None
        self._last_round = objective.rounds
        self._seq = 0
        self._now_s = 0.0
        self._granted: dict[int, Grant] = {}
        """By worker, what it is to begin with."""
        self._curve: dict[int, list[tuple[int, float]]] = {}
        """By worker, what its present slice has told."""
        self._worked_s: dict[int, float] = {}

    def moves(self, idle: list[int]) -> list[Move]:
        if not self._granted:
            self._decide()
        found = []
        for worker in idle:
            grant = self._granted.pop(worker, None)
            if grant is not None:
                trial = self.study.trials[grant.trial]
                found.append(Move(worker, grant.trial, trial.values, trial.saved))
        return found

    def report(self, worker: int, trial: int, rounds: int, loss: float, seconds: float) -> bool:
        grant = self.study.grant_of(worker)
        assert grant is not None and grant.trial == trial
        self._worked_s[worker] = self._worked_s.get(worker, 0.0) + seconds * SECONDS_COUNT_AS
        if math.isfinite(loss):
            self._curve.setdefault(worker, []).append((rounds, loss))
        outcome: SliceOutcome
        if not math.isfinite(loss):
            outcome = "diverged"
        elif grant.until and rounds >= grant.until:
            outcome = "reached"
        elif rounds >= self._last_round:
            outcome = "finished"
        else:
            return True
        self._end_slice(grant, outcome, rounds)
        self._decide()
        follows = self._granted.get(worker)
        if follows is None or follows.trial != trial:
            return False
        del self._granted[worker]
        return True

    def _end_slice(self, grant: Grant, outcome: SliceOutcome, rounds: int) -> None:
        curve = tuple(self._curve.pop(grant.worker, []))
        result = Result(
            outcome=outcome,
            rounds=rounds,
            step=rounds,
            metrics={"loss": curve[-1][1]} if curve else {},
            curve=curve,
            saved=rounds,
            worked_s=self._worked_s.pop(grant.worker, 0.0),
        )
        self._apply(ev.SliceEnded(run=RUN, attempt=1, index=grant.worker, number=grant.number, result=result))

    def _decide(self) -> None:
        for _ in range(MAX_ROUNDS_OF_DECISIONS):
            lanes = Lanes(self._run, self.study, self._now_s)
            intents = lanes.steer()
            for intent in intents:
                assert isinstance(intent, ev.SliceGranted | ev.TrialsProposed | ev.TrialEnded), intent
                self._apply(intent)
            if intents:
                continue
            if not lanes.wants or self._proposing is None:
                return
            self._apply(self._proposing.propose(self.study, lanes.wants, self._seq))
        raise AssertionError("decisions do not settle")

    def _apply(self, event: Any) -> None:
        self._seq += 1
        self.study.apply(event, self._seq, self._now_s)
        if isinstance(event, ev.SliceGranted):
            self._granted[event.grant.worker] = event.grant


class Proposing:
    """The proposer, asked and told as the control process does it, without a process between."""

    def __init__(self, seed: int) -> None:
        self._answers = Answers(Path(), "simulated")
        self._seed = seed
        self._terms: StudySpec | None = None
        self._told_upto = -1
        self._window: frozenset[int] = frozenset()

    def propose(self, study: Study, count: int, seq: int) -> ev.TrialsProposed:
        first = len(study.trials)
        newest_from = window_from(first)
        best = sorted(number for _, number in study.ranking[:NUM_BEST] if number < newest_from)
        window = frozenset((*best, *range(newest_from, first)))
        changed = {trial.number for trial in study.changed_since(self._told_upto)} & window
        tell = sorted(changed | (window - self._window))
        ask = ProposerAsk(
            number=first,
            first=first,
            count=min(count, MAX_COUNT),
            seed=self._seed,
            newest_from=newest_from,
            best=tuple(best),
            outcomes=tuple(outcome_of(study.trials[number], study.levels) for number in tell),
            terms=study.terms if self._terms is None else None,
        )
        proposed = self._answers.answer(ask)
        assert proposed.failure is None and not proposed.missing and not proposed.needs_terms, proposed
        self._terms, self._told_upto, self._window = study.terms, seq, window
        return accept(study, RUN, self._seed, ask.count, proposed.proposals)
