"""Freeze-thaw and population based training: who goes on, who gives up, who is copied."""

from typing import Any

import pytest
from decide_stage import node
from test_decide_tune import TuneStage, first_rounds_best

from racimo.decide.tune.freeze_thaw import predicted
from racimo.decide.tune.population import explore
from racimo.spec.study import StudySpec
from racimo.state import events as ev
from racimo.state.study import Study, levels
from racimo.state.trials import Trial


@pytest.fixture
def stage() -> TuneStage:
    return TuneStage(node(4))


# Freeze-thaw


def falling(to: float, by: float) -> tuple[tuple[int, float], ...]:
    return tuple((rounds, to + by / rounds) for rounds in (1, 2, 4, 8))


def study_of(**terms: Any) -> Study:
    return Study(StudySpec(**{"space": {"x": "0.0..1.0"}, "metric": "loss", "scheduler": "freeze-thaw", **terms}))


def test_slices_of_freeze_thaw_grow_by_half() -> None:
    assert levels(study_of(rounds=20).terms) == (1, 2, 3, 4, 6, 9, 13, 19, 20)


def test_a_curve_is_carried_on_as_far_as_it_still_falls() -> None:
    study = study_of(rounds=16)
    steep = Trial(number=0, values={}, curve=falling(0.0, 1.0))
    flat = Trial(number=1, values={}, curve=falling(0.1, 0.1))
    assert steep.curve[-1][1] > flat.curve[-1][1], "the flat one is better now"
    assert predicted(study, steep, 16) < predicted(study, flat, 16), "and will not be at the end"


def test_a_curve_of_one_point_or_that_rises_promises_nothing() -> None:
    study = study_of(rounds=16)
    assert predicted(study, Trial(number=0, values={}, curve=((1, 0.5),)), 16) == 0.5
    assert predicted(study, Trial(number=0, values={}, curve=((1, 0.1), (2, 0.5))), 16) == 0.5


def test_what_is_to_be_maximised_is_carried_on_upwards() -> None:
    study = study_of(metric="max loss", rounds=16)
    rising = Trial(number=0, values={}, curve=((1, 0.0), (2, 0.5), (4, 0.75)))
    assert predicted(study, rising, 16) < -0.75


def test_the_most_promising_thaws_before_the_best_so_far(stage: TuneStage) -> None:
    run = stage.tune(trials=4, parallel=1, rounds=9, scheduler="freeze-thaw")
    falls = {0: (0.2, 0.05), 1: (0.0, 0.4), 2: (5.0, 0.1), 3: (6.0, 0.1)}  # trial: (end, distance)
    told = stage.play(run, lambda trial, values, rounds: falls[trial][0] + falls[trial][1] / rounds, rounds=9)
    first_to_three = next(trial for trial, until in told if until == 3)
    assert first_to_three == 1 and stage.study(run).trials[1].status == "finished"
    assert stage.run(run).status == "succeeded"


def test_a_thaw_says_what_is_expected(stage: TuneStage) -> None:
    run = stage.tune(trials=9, parallel=1, rounds=9, scheduler="freeze-thaw")
    stage.play(run, first_rounds_best, rounds=9)
    thaws = [r.event.reason for r in stage.core.store.records(run)
             if isinstance(r.event, ev.SliceGranted) and r.event.reason.code == "thaws"]  # fmt: skip
    assert "on its way to" in thaws[0].text and "predicted" in thaws[0].counts


def test_freeze_thaw_brings_one_trial_to_its_end(stage: TuneStage) -> None:
    run = stage.tune(trials=5, parallel=2, rounds=20, scheduler="freeze-thaw")
    stage.play(run, first_rounds_best, rounds=20)
    assert stage.study(run).counts["finished"] >= 1 and stage.run(run).status == "succeeded"


def test_freeze_thaw_gives_nothing_more_to_what_diverged(stage: TuneStage) -> None:
    run = stage.tune(trials=8, parallel=2, rounds=9, scheduler="freeze-thaw")
    told = stage.play(run, lambda trial, values, rounds: None if trial == 0 else trial, rounds=9)
    assert [until for trial, until in told if trial == 0] == [1]


# Population based training


def population(stage: TuneStage, **terms: Any) -> str:
    usual = {"scheduler": "population", "parallel": 4, "rounds": 12, "first_round": 2, "trials": 12}
    return stage.tune(**{**usual, **terms})


def test_the_worst_gives_up_and_a_copy_of_the_best_comes_in_its_place(stage: TuneStage) -> None:
    run = population(stage)
    stage.play(run, first_rounds_best, most=4)
    trials = stage.study(run).trials
    assert trials[3].status == "stopped" and trials[3].reason is not None and trials[3].reason.code == "worst-quarter"
    assert trials[4].parent == 0 and trials[4].by == "population" and trials[4].values != trials[0].values
    grant = next(grant for grant in stage.grants(run).values() if grant.trial == 4)
    assert grant.state_of == 0 and grant.until == trials[0].saved + 2


def test_nobody_is_copied_who_has_saved_nothing(stage: TuneStage) -> None:
    """ray#9036: a population clone read a checkpoint that was never written."""
    run = population(stage)
    for _ in range(8):
        stage.all_ready(run)
        worker, grant = min(stage.grants(run).items(), key=lambda item: item[1].number)
        rounds = stage.study(run).trials[grant.trial].rounds + 2
        result = {"rounds": rounds, "saved": 0}
        _end_unsaved(stage, run, worker, float(grant.trial), **result)
    assert all(trial.parent is None for trial in stage.study(run).trials)
    assert "stopped" not in stage.study(run).counts


def _end_unsaved(stage: TuneStage, run: str, worker: int, loss: float, rounds: int, saved: int) -> None:
    from racimo.state.trials import Result

    grant = stage.grants(run)[worker]
    result = Result(outcome="reached", rounds=rounds, metrics={"loss": loss}, curve=((rounds, loss),), saved=saved)
    event = ev.SliceEnded(run=run, attempt=stage.run(run).attempt, index=worker, number=grant.number, result=result)
    stage.core.agent_event(event)
    stage.turn()


def test_the_place_of_a_member_that_diverged_is_filled(stage: TuneStage) -> None:
    run = population(stage)
    stage.play(run, lambda trial, values, rounds: None if trial == 3 and rounds > 2 else float(trial % 4), most=12)
    study = stage.study(run)
    alive = sum(study.counts.get(status, 0) for status in ("waiting", "running", "paused", "finished"))
    assert alive == 4


def test_a_population_ends_when_its_members_have_come_to_their_end(stage: TuneStage) -> None:
    run = population(stage)
    stage.play(run, first_rounds_best, rounds=12)
    assert stage.run(run).status == "succeeded"
    assert stage.study(run).counts["finished"] == 4


def test_no_more_members_begin_than_the_population_has(stage: TuneStage) -> None:
    run = population(stage, parallel=3)
    stage.all_ready(run)
    assert len(stage.study(run).trials) == 3


def test_a_clone_differs_but_stays_within_the_space_and_its_constraints() -> None:
    terms = StudySpec(
        space={
            "rate": "log 1e-4..1e-1", "width": "8..64 step 8", "layers": "1..4", "kind": ["a", "b"],
            "momentum": {"is": "0.0..0.99", "when": {"kind": "a"}},
        },
        metric="loss",
        constraints=("width * layers <= 128",),
    )  # fmt: skip
    space = terms.parsed_space
    values = space.complete({"rate": 0.1, "width": 64, "layers": 2, "kind": "a", "momentum": 0.99})
    for number in range(200):
        found = explore(space, values, 7, number)
        assert space.complete(found) == found and found != values
        assert found == explore(space, values, 7, number)


def test_a_restart_copies_the_same_member_in_the_same_way(stage: TuneStage) -> None:
    other = TuneStage(node(4))
    runs = [population(one) for one in (stage, other)]
    straight = stage.play(runs[0], first_rounds_best, rounds=12)
    told: list[tuple[int, int]] = []
    while not other.run(runs[1]).ended:
        told += other.play(runs[1], first_rounds_best, most=1, rounds=12)
        other.restart()
        other.core.node_joined(node(4))
        other.turn()
    assert told == straight
    assert [t.values for t in stage.study(runs[0]).trials] == [t.values for t in other.study(runs[1]).trials]
