"""What a tune run does next: workers, slices, promotions, ends."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from decide_stage import Stage, node

from racimo.control.effects import Slice, Start
from racimo.decide.tune.draw import halton, uniform
from racimo.spec.errors import RacimoError
from racimo.spec.run import RunSpec
from racimo.spec.study import StudySpec
from racimo.state import events as ev
from racimo.state.nouns import Failure
from racimo.state.study import Study
from racimo.state.trials import Grant, Result

Loss = Callable[[int, dict[str, Any], int], float | None]


def first_rounds_best(trial: int, values: dict[str, Any], rounds: int) -> float:
    return trial + 1.0 / rounds


class TuneStage(Stage):
    """Workers that run their slices at once, when told to."""

    def tune(self, **terms: Any) -> str:
        spec: dict[str, Any] = {"space": {"x": "0.0..1.0"}, "metric": "loss", "proposer": "random", **terms}
        more = {name: spec.pop(name) for name in ("priority", "devices") if name in spec}
        return self._submit(RunSpec(tune="t.py:f", study=StudySpec(**spec), **more))

    def study(self, run: str) -> Study:
        return self.state.studies[run]

    def all_ready(self, run: str) -> None:
        new = [w.index for w in self.run(run).live_workers if w.status != "ready" and not w.leaving]
        if new:
            self.started(run, *new)
            self.ready(run, *new, micro_shards=10_000)

    def grants(self, run: str) -> dict[int, Grant]:
        """By worker."""
        study = self.study(run)
        return {worker: grant for worker in study.running if (grant := study.grant_of(worker)) is not None}

    def end_slice(self, run: str, worker: int, outcome: Any = "reached", loss: float | None = 1.0, **more: Any) -> None:
        grant = self.grants(run)[worker]
        rounds = more.pop("rounds", grant.until or 1)
        metrics, curve = ({"loss": loss}, ((rounds, loss),)) if loss is not None else ({}, ())
        result = Result(
            outcome=outcome,
            rounds=rounds,
            step=rounds,
            metrics=metrics,
            curve=curve,
            saved=rounds,
            worked_s=1.0,
            **more,
        )
        attempt = self.run(run).attempt
        event = ev.SliceEnded(run=run, attempt=attempt, index=worker, number=grant.number, result=result)
        self.core.agent_event(event)
        self.turn()

    def play(self, run: str, loss: Loss, most: int = 1_000, rounds: int = 0) -> list[tuple[int, int]]:
        """Ends slices, the oldest first, until nothing runs; the slices as (trial, until). Workers that leave exit."""
        told: list[tuple[int, int]] = []
        for _ in range(most):
            self.all_ready(run)
            for one in self.run(run).live_workers:
                if one.leaving:
                    self.exit(run, one.index, "released")
            grants = self.grants(run)
            if not grants:
                break
            worker, grant = min(grants.items(), key=lambda item: item[1].number)
            values = self.study(run).trials[grant.trial].values
            value = loss(grant.trial, values, grant.until or rounds or 1)
            told.append((grant.trial, grant.until))
            over = not grant.until or (rounds and grant.until >= rounds)
            self.end_slice(run, worker, "diverged" if value is None else "finished" if over else "reached", value)
        return told


@pytest.fixture
def stage() -> TuneStage:
    return TuneStage(node(4))


def test_a_tune_run_gets_as_many_workers_as_there_may_be_trials_at_a_time(stage: TuneStage) -> None:
    run = stage.tune(trials=10, parallel=3)
    assert [type(effect) for effect in stage.effects] == [Start] * 3
    stage.all_ready(run)
    assert len(stage.grants(run)) == 3 and len(stage.study(run).trials) == 3


def test_each_slice_goes_to_its_worker_with_the_point(stage: TuneStage) -> None:
    run = stage.tune(trials=2, rounds=9)
    index = stage.run(run).live_workers[0].index
    stage.started(run, index)
    stage.ready(run, index, micro_shards=10_000)
    (given,) = [effect for effect in stage.effects if isinstance(effect, Slice)]
    assert given.worker == f"{run}/1/{index}" and given.order.grant.until == 1
    assert given.order.values == stage.study(run).trials[0].values
    assert given.order.objectives == ("loss",)


def test_halving_promotes_one_of_three_and_the_rest_stay_paused(stage: TuneStage) -> None:
    run = stage.tune(trials=9, parallel=1, rounds=9)
    told = stage.play(run, first_rounds_best, rounds=9)
    study = stage.study(run)
    assert [trial for trial, until in told if until == 1] == list(range(9))
    assert sorted(trial for trial, until in told if until == 3) == [0, 1, 2]
    assert [trial for trial, until in told if until == 9] == [0]
    assert study.trials[0].status == "finished" and study.counts == {"finished": 1, "paused": 8}
    assert stage.run(run).status == "succeeded"


def test_what_is_promoted_says_its_rank(stage: TuneStage) -> None:
    run = stage.tune(trials=3, parallel=1, rounds=9)
    stage.play(run, first_rounds_best, most=3)
    stage.all_ready(run)
    grant = next(intent for intent in stage.intents if isinstance(intent, ev.SliceGranted)) if stage.intents else None
    records = [r.event for r in stage.core.store.records(run)]
    last = [event for event in records if isinstance(event, ev.SliceGranted)][-1]
    assert grant is None or grant == last
    assert last.reason.text == "promoted: 1st of 3 after 1 rounds, until 3 rounds"


def test_a_trial_that_diverged_gets_no_further_slice_and_is_never_promoted(stage: TuneStage) -> None:
    """ray#6659: the NaN trial itself ran on to the end."""
    run = stage.tune(trials=9, parallel=1, rounds=9)
    told = stage.play(run, lambda trial, values, rounds: None if trial == 0 else trial, rounds=9)
    assert [until for trial, until in told if trial == 0] == [1]
    assert stage.study(run).trials[0].status == "diverged"
    assert sorted(trial for trial, until in told if until == 3) == [1, 2, 3]


def test_without_a_scheduler_every_trial_runs_to_its_end(stage: TuneStage) -> None:
    run = stage.tune(trials=5, scheduler="none")
    told = stage.play(run, first_rounds_best)
    assert sorted(told) == [(n, 0) for n in range(5)]
    assert stage.study(run).counts == {"finished": 5}


def test_the_median_rule_stops_what_is_worse_than_the_middle(stage: TuneStage) -> None:
    run = stage.tune(trials=8, parallel=1, scheduler="median", rounds=4)
    stage.play(run, first_rounds_best, rounds=4)
    study = stage.study(run)
    assert study.counts["stopped"] >= 1 and study.trials[0].status == "finished"
    stopped = next(trial for trial in study.trials if trial.status == "stopped")
    assert stopped.reason is not None and "worse than the median" in stopped.reason.text


def test_a_worker_goes_on_with_the_trial_that_it_has_at_hand(stage: TuneStage) -> None:
    run = stage.tune(trials=4, parallel=2, scheduler="median", rounds=9)
    stage.all_ready(run)
    for _ in range(3):
        for worker, grant in list(stage.grants(run).items()):
            stage.end_slice(run, worker, "reached", 1.0)
            assert stage.grants(run)[worker].trial == grant.trial


def test_a_lost_worker_is_replaced_and_its_trial_goes_on_from_what_was_saved(stage: TuneStage) -> None:
    run = stage.tune(trials=3, parallel=1, rounds=9)
    stage.play(run, first_rounds_best, most=3)
    stage.all_ready(run)
    ((worker, grant),) = stage.grants(run).items()
    stage.exit(run, worker, "killed")
    trial = stage.study(run).trials[grant.trial]
    assert trial.status == "waiting" and trial.retries == 1 and trial.rounds == trial.saved
    stage.all_ready(run)
    ((_, again),) = stage.grants(run).items()
    assert (again.trial, again.until) == (grant.trial, grant.until) and again.number > grant.number


def test_a_trial_whose_worker_dies_too_often_fails_and_the_study_goes_on(stage: TuneStage) -> None:
    run = stage.tune(trials=2, parallel=1, retries=1, scheduler="none")
    for _ in range(2):
        stage.all_ready(run)
        stage.exit(run, next(iter(stage.grants(run))), "killed")
        stage.turn(60.0)
    assert stage.study(run).trials[0].status == "failed"
    stage.play(run, first_rounds_best)
    assert stage.study(run).trials[1].status == "finished" and stage.run(run).status == "succeeded"


def test_an_objective_that_always_fails_ends_the_study_with_the_first_traceback(stage: TuneStage) -> None:
    run = stage.tune(trials=100, parallel=1, scheduler="none")
    stage.all_ready(run)
    for number in range(5):
        failure = Failure(code="worker-raised", message=f"ValueError: number {number}", traceback="Traceback ...")
        stage.end_slice(run, next(iter(stage.grants(run))), "failed", None, failure=failure)
    assert not stage.grants(run)
    stage.play(run, first_rounds_best)
    ended = stage.run(run)
    assert ended.status == "failed" and ended.failure is not None and ended.failure.message == "ValueError: number 0"


def test_a_worker_that_is_killed_before_it_began_does_not_end_the_study(stage: TuneStage) -> None:
    run = stage.tune(trials=2, parallel=1, scheduler="none")
    for _ in range(4):
        (worker,) = stage.run(run).live_workers
        stage.exit(run, worker.index, "killed")
        stage.turn(60.0)
    assert stage.run(run).status == "running"
    stage.play(run, first_rounds_best)
    assert stage.study(run).counts == {"finished": 2}


def test_workers_that_always_die_before_they_begin_end_the_study(stage: TuneStage) -> None:
    run = stage.tune(trials=2, parallel=1)
    for _ in range(5):
        assert not stage.run(run).ended
        (worker,) = stage.run(run).live_workers
        stage.exit(run, worker.index, "killed")
        stage.turn(60.0)
    assert stage.run(run).status == "failed" and "killed by signal 9" in stage.run(run).reason.text  # type: ignore[union-attr]


def test_workers_whose_code_fails_before_they_begin_end_the_study_at_once(stage: TuneStage) -> None:
    run = stage.tune(trials=2, parallel=1)
    stage.started(run, 0)
    stage.exit(run, 0, "failed", code="module-missing")
    assert stage.run(run).status == "failed" and stage.run(run).failure.code == "module-missing"  # type: ignore[union-attr]


def test_deaths_count_from_the_last_result_on(stage: TuneStage) -> None:
    run = stage.tune(trials=100, parallel=1, rounds=9, retries=1_000)
    for _ in range(12):
        stage.all_ready(run)
        ((worker, _),) = stage.grants(run).items()
        stage.end_slice(run, worker)
        stage.exit(run, worker, "killed")
        stage.turn(60.0)
    assert stage.run(run).status == "running"


def test_one_trial_that_fails_does_not_spoil_the_study(stage: TuneStage) -> None:
    """ray#30584: fail-fast marked everything terminated."""
    run = stage.tune(trials=4, parallel=1, scheduler="none")
    stage.all_ready(run)
    stage.end_slice(run, 0, "failed", None, failure=Failure(code="worker-raised", message="no"))
    stage.play(run, first_rounds_best)
    assert stage.study(run).counts == {"failed": 1, "finished": 3} and stage.run(run).status == "succeeded"


def test_workers_that_have_nothing_left_to_do_give_their_devices_back(stage: TuneStage) -> None:
    run = stage.tune(trials=4, parallel=4, scheduler="none")
    stage.all_ready(run)
    for worker in (0, 1, 2):
        stage.end_slice(run, worker, "finished", 1.0)
    leaving = [worker.index for worker in stage.run(run).live_workers if worker.leaving == "release"]
    assert leaving == [0, 1, 2]


def test_points_of_the_user_come_first_and_no_point_twice(stage: TuneStage) -> None:
    run = stage.tune(trials=6, space={"x": "1..6"}, defaults={"x": 3}, points=({"x": 5},), scheduler="none")
    stage.play(run, first_rounds_best)
    tried = [trial.values["x"] for trial in stage.study(run).trials]
    assert tried[:2] == [3, 5] and sorted(tried) == [1, 2, 3, 4, 5, 6]  # type: ignore[type-var]


@pytest.mark.parametrize("proposer", ["grid", "random", "quasi-random"])
def test_a_space_that_is_used_up_ends_the_study(stage: TuneStage, proposer: str) -> None:
    """optuna#5489: grid points repeated, or the study never ended."""
    space = {"x": "1..3", "y": ["a", "b"]}
    run = stage.tune(trials=100, proposer=proposer, scheduler="none", space=space, constraints=("x != 2",))
    stage.play(run, first_rounds_best)
    points = {(trial.values["x"], trial.values["y"]) for trial in stage.study(run).trials}
    assert len(stage.study(run).trials) == 4 and points == {(x, y) for x in (1, 3) for y in "ab"}
    assert stage.run(run).status == "succeeded" and "no further point" in stage.run(run).reason.text  # type: ignore[union-attr]


def test_a_restart_decides_what_would_have_been_decided(stage: TuneStage) -> None:
    """ray#30861: a restore swapped the searcher, or forgot what was pending."""
    other = TuneStage(node(4))
    runs = [one.tune(trials=12, parallel=1, rounds=9) for one in (stage, other)]
    straight = stage.play(runs[0], first_rounds_best, rounds=9)
    told: list[tuple[int, int]] = []
    while other.state.runs[runs[1]].status not in ("succeeded", "failed"):
        told += other.play(runs[1], first_rounds_best, most=1, rounds=9)
        other.restart()
        other.core.node_joined(node(4))
        other.turn()
    assert told == straight
    assert [t.values for t in stage.study(runs[0]).trials] == [t.values for t in other.study(runs[1]).trials]


def test_more_trials_go_on_with_a_study_that_has_ended(stage: TuneStage) -> None:
    run = stage.tune(trials=3, scheduler="none")
    stage.play(run, first_rounds_best)
    assert stage.run(run).ended
    terms = stage.study(run).terms
    stage.core.change_study(run, StudySpec(**{**_fields(terms), "trials": 5}), other_space=False)
    stage.turn()
    stage.play(run, first_rounds_best)
    assert stage.study(run).counts == {"finished": 5} and stage.run(run).status == "succeeded"


def test_another_space_is_refused_unless_it_is_meant(stage: TuneStage) -> None:
    run = stage.tune(trials=3, scheduler="none")
    wider = StudySpec(**{**_fields(stage.study(run).terms), "space": {"x": "0.0..2.0"}, "trials": 20})
    with pytest.raises(RacimoError, match=r"x: 0\.0\.\.1\.0 -> 0\.0\.\.2\.0"):
        stage.core.change_study(run, wider, other_space=False)
    stage.core.change_study(run, wider, other_space=True)
    stage.turn()
    stage.play(run, first_rounds_best)
    assert any(trial.values["x"] > 1.0 for trial in stage.study(run).trials)  # type: ignore[operator]


def _fields(terms: StudySpec) -> dict[str, Any]:
    return {name: getattr(terms, name) for name in terms.__struct_fields__}


def test_draws_are_spread_and_the_same_for_the_same_seed() -> None:
    assert uniform("a", 1) == uniform("a", 1) != uniform("a", 2)
    mean = sum(uniform("x", n) for n in range(2_000)) / 2_000
    assert 0.48 < mean < 0.52
    for axis in (0, 5, 50):
        points = sorted(halton(n, axis, 7) for n in range(512))
        assert len(set(points)) == 512 and points[0] >= 0 and points[-1] < 1
        gaps = max(b - a for a, b in itertools.pairwise(points))
        assert gaps < 0.05, f"axis {axis} leaves a gap of {gaps}"
