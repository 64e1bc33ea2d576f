"""The tables of a study follow from what happened, and are the same after a restart."""

import random
from typing import Any

import pytest

from racimo.spec.study import StudySpec
from racimo.state import events as ev
from racimo.state.nouns import Reason
from racimo.state.study import Bill, Study, joined, levels
from racimo.state.trials import MAX_CURVE_POINTS, Grant, Proposal, Result

WHY = Reason(code="test", text="")


def terms(**more: Any) -> StudySpec:
    return StudySpec(**{"space": {"x": "0.0..1.0"}, "metric": "loss", "trials": 50, **more})


class Told:
    """A study and a way to let things happen to it."""

    def __init__(self, study: Study) -> None:
        self.study, self.seq = study, 0

    def tell(self, event: Any) -> None:
        self.seq += 1
        self.study.apply(event, self.seq, float(self.seq), Bill(node="n", price_per_device_hour=3600.0))

    def propose(self, count: int) -> None:
        first = len(self.study.trials)
        points = tuple(Proposal(values={"x": (first + i) / 1000}, by="random", draw=first + i) for i in range(count))
        self.tell(ev.TrialsProposed(run="s", first=first, proposals=points))

    def grant(self, trial: int, worker: int = 0, until: int = 0) -> None:
        grant = Grant(number=self.study.num_slices + 1, trial=trial, worker=worker, until=until)
        self.tell(ev.SliceGranted(run="s", attempt=1, grant=grant, reason=WHY))

    def end(self, worker: int, outcome: Any, rounds: int = 1, loss: float | None = None, **more: Any) -> None:
        grant = self.study.grant_of(worker)
        assert grant is not None
        metrics = {} if loss is None else {"loss": loss}
        curve = () if loss is None else ((rounds, loss),)
        result = Result(outcome=outcome, rounds=rounds, step=rounds, metrics=metrics, curve=curve, worked_s=1.0, **more)
        self.tell(ev.SliceEnded(run="s", attempt=1, index=worker, number=grant.number, result=result))


@pytest.fixture
def told() -> Told:
    return Told(Study(terms(first_round=1, eta=3, rounds=9)))


def test_rungs_are_whole_numbers_and_none_is_lost_to_a_logarithm() -> None:
    """optuna PR#6835: 243 is 3 to the fifth, and log(243, 3) is less than 5."""
    assert levels(terms(first_round=1, eta=3, rounds=243)) == (1, 3, 9, 27, 81, 243)
    assert levels(terms(first_round=2, eta=2, rounds=9)) == (2, 4, 8, 9)


def test_a_trial_that_reaches_its_rounds_is_paused_and_stands_on_its_rung(told: Told) -> None:
    told.propose(2)
    told.grant(0, until=1)
    told.end(0, "reached", 1, 0.5, saved=1)
    assert told.study.trials[0].status == "paused" and told.study.rungs[1].waiting == [(0.5, 0)]
    assert told.study.best is told.study.trials[0] and told.study.cost == 1.0


def test_a_trial_that_diverged_is_worst_on_its_rungs_and_never_best(told: Told) -> None:
    """ray#6659: one NaN made the cut-off NaN."""
    told.propose(3)
    for number, loss in ((0, 0.5), (1, 0.4)):
        told.grant(number, until=1)
        told.end(0, "reached", 1, loss, saved=1)
    told.grant(1, until=3)
    told.end(0, "diverged", 2)
    assert told.study.trials[1].status == "diverged"
    assert told.study.rungs[1].standings == [(0.5, 0), (float("inf"), 1)]
    assert [number for _, number in told.study.ranking] == [0]


def test_a_result_of_another_slice_changes_nothing(told: Told) -> None:
    """syne-tune#214: a result was filed under another trial."""
    told.propose(2)
    told.grant(0, until=1)
    old = told.study.grant_of(0)
    told.end(0, "reached", 1, 0.5)
    told.grant(1, until=1)
    assert old is not None
    before = told.study.keep()
    result = Result(outcome="finished", rounds=1, metrics={"loss": 0.0}, curve=((1, 0.0),))
    told.tell(ev.SliceEnded(run="s", attempt=1, index=0, number=old.number, result=result))
    assert told.study.keep() == before


def test_a_lost_worker_costs_its_trial_a_retry_and_then_the_trial(told: Told) -> None:
    told.propose(1)
    for loss in range(3):
        assert told.study.trials[0].status == "waiting"
        told.grant(0, until=1)
        told.study.lose(0, 99, 200.0 + loss, Bill(node="n"))
    assert told.study.trials[0].status == "failed" and told.study.trials[0].retries == 3


def test_proposals_told_twice_are_trials_once(told: Told) -> None:
    """optuna#5489: points repeat."""
    points = (Proposal(values={"x": 0.5}),)
    for _ in range(2):
        told.tell(ev.TrialsProposed(run="s", first=0, proposals=points))
    assert len(told.study.trials) == 1


@pytest.mark.parametrize("seed", range(20))
def test_the_tables_after_a_restart_are_those_before(seed: int) -> None:
    """warprec#126: after a restore the rungs were empty."""
    chance = random.Random(seed)
    told = Told(Study(terms(first_round=1, eta=2, rounds=8, retries=1)))
    for _ in range(300):
        study = told.study
        free = [worker for worker in range(4) if worker not in study.running]
        choice = chance.random()
        if choice < 0.15 and study.num_to_propose:
            told.propose(chance.randint(1, 3))
        elif choice < 0.55 and free and (ready := [*study.waiting, *study.paused]):
            told.grant(chance.choice(ready), free[0], study.next_level(study.trials[ready[0]].rounds))
        elif study.running:
            worker = chance.choice(list(study.running))
            grant = study.grant_of(worker)
            assert grant is not None
            if chance.random() < 0.1:
                study.lose(worker, told.seq, 1.0, Bill())
            else:
                outcome = chance.choice(["reached", "reached", "finished", "diverged", "halted", "failed"])
                rounds = grant.until or 8
                told.end(worker, outcome, rounds, chance.random() if outcome != "failed" else None, saved=rounds)
    again = Study.restored(told.study.keep())
    private = {"changed_at", "_changes"}
    for name, value in vars(told.study).items():
        if name in private or name in ("rungs", "_limits"):
            continue
        if isinstance(value, float):
            assert getattr(again, name) == pytest.approx(value), name
        else:
            assert getattr(again, name) == value, f"{name} (seed {seed})"
    for rounds, rung in told.study.rungs.items():
        other = again.rungs.get(rounds)
        assert (rung.standings, rung.waiting) == ((other.standings, other.waiting) if other else ([], []))


def test_whoever_has_seen_some_records_is_told_what_changed_since_even_after_a_restart(told: Told) -> None:
    told.propose(3)
    seen = told.seq
    told.grant(1, until=1)
    told.end(0, "reached", 1, 0.5)
    again = Study.restored(told.study.keep(), told.seq)
    assert [trial.number for trial in told.study.changed_since(seen)] == [1]
    assert {1} <= {trial.number for trial in again.changed_since(seen)}
    assert again.changed_since(told.seq) == []
    again.apply(ev.TrialEnded(run="s", trial=2, status="stopped", reason=WHY), told.seq + 1, 9.0)
    assert [trial.number for trial in again.changed_since(told.seq)] == [2]


def test_after_new_terms_every_trial_counts_as_changed(told: Told) -> None:
    told.propose(3)
    seen = told.seq
    told.tell(ev.StudyChanged(run="s", study=terms(trials=80, rounds=9)))
    assert told.study.changed_at == told.seq and len(told.study.changed_since(seen)) == 3
    assert told.study.changed_since(told.seq) == []


def test_a_worker_that_was_asked_to_leave_costs_its_trial_no_retry(told: Told) -> None:
    told.propose(1)
    told.grant(0, until=1)
    told.study.lose(0, 99, 200.0, Bill(node="n"), asked=True)
    assert told.study.trials[0].status == "waiting" and told.study.trials[0].retries == 0


def test_a_long_curve_is_thinned_but_not_at_the_rungs() -> None:
    curve = joined((), tuple((n, float(n)) for n in range(1, 1000)), (1, 3, 9, 27, 81, 243))
    assert len(curve) <= MAX_CURVE_POINTS
    assert {1, 3, 9, 27, 81, 243, 999} <= {rounds for rounds, _ in curve}
    assert joined(curve, ((999, 0.0), (1000, 1.0)), ())[-1] == (1000, 1.0)
