"""What becomes of proposed points: trials, random ones in the place of unusable ones, or the end of the study."""

from typing import Any

import pytest
from decide_stage import node
from test_decide_tune import TuneStage, first_rounds_best

from racimo.agent.propose_protocol import Proposed
from racimo.decide.tune.ahead import MOST_AHEAD
from racimo.decide.tune.draw import NUM_FIRST_RANDOM
from racimo.state import events as ev
from racimo.state.nouns import Failure
from racimo.state.trials import Proposal, Result


@pytest.fixture
def stage() -> TuneStage:
    return TuneStage(node(2))


def points(*values: Any, by: str = "tpe") -> tuple[Proposal, ...]:
    return tuple(Proposal(values={"x": value}, by=by) for value in values)


def take(stage: TuneStage, run: str, *proposals: Proposal, **answer: Any) -> None:
    study = stage.study(run)
    count = stage.core.wants.get(run, len(proposals))
    stage.core.take_proposals(
        run, study.terms, len(study.trials), count, Proposed(number=1, proposals=proposals, **answer)
    )
    stage.turn()


def learning(stage: TuneStage, **terms: Any) -> str:
    """A study whose random start is over: each further trial is to be proposed."""
    run = stage.tune(**{"proposer": "tpe", "scheduler": "none", "trials": 100, "parallel": 1, **terms})
    stage.play(run, first_rounds_best, most=NUM_FIRST_RANDOM)
    stage.all_ready(run)
    assert len(stage.study(run).trials) == NUM_FIRST_RANDOM and not stage.grants(run)
    return run


def test_the_first_points_are_random_and_then_the_proposer_is_wanted(stage: TuneStage) -> None:
    run = learning(stage)
    assert stage.core.wants == {run: 1}
    take(stage, run, *points(0.25))
    trial = stage.study(run).trials[-1]
    assert (trial.values, trial.by, trial.status) == ({"x": 0.25}, "tpe", "running")
    assert run not in stage.core.wants


def test_in_the_place_of_a_duplicate_comes_a_random_point_that_is_called_so(stage: TuneStage) -> None:
    run = learning(stage)
    known = stage.study(run).trials[3].values["x"]
    take(stage, run, *points(known))
    trial = stage.study(run).trials[-1]
    assert trial.by == "random" and trial.values["x"] != known


def test_what_breaks_a_constraint_is_not_tried(stage: TuneStage) -> None:
    run = learning(stage, constraints=("x < 0.5",))
    take(stage, run, *points(0.75))
    trial = stage.study(run).trials[-1]
    assert trial.by == "random" and trial.values["x"] < 0.5


def test_where_a_built_in_proposer_finds_nothing_chance_does_until_the_space_is_used_up(stage: TuneStage) -> None:
    run = stage.tune(proposer="tpe", scheduler="none", trials=100, parallel=1, space={"x": "1..12"})
    stage.play(run, first_rounds_best, most=NUM_FIRST_RANDOM)
    stage.all_ready(run)
    for _ in range(2):
        take(stage, run)
        stage.play(run, first_rounds_best, most=1)
        stage.all_ready(run)
    assert sorted(trial.values["x"] for trial in stage.study(run).trials) == list(range(1, 13))
    take(stage, run)
    stage.play(run, first_rounds_best)
    assert stage.run(run).status == "succeeded"
    assert stage.run(run).reason is not None and "no further point" in stage.run(run).reason.text


def test_a_users_proposer_that_has_no_point_left_ends_the_study(stage: TuneStage) -> None:
    run = learning(stage, proposer="own.py:Own")
    take(stage, run)
    stage.play(run, first_rounds_best)
    assert stage.run(run).status == "succeeded" and len(stage.study(run).trials) == NUM_FIRST_RANDOM


def test_a_point_outside_the_space_fails_the_study_and_is_shown(stage: TuneStage) -> None:
    run = learning(stage, proposer="own.py:Own")
    take(stage, run, *points(1.5, by="own.py:Own"))
    stage.play(run, first_rounds_best)
    ended = stage.run(run)
    assert ended.status == "failed" and ended.failure is not None and ended.failure.code == "proposer-failed"
    assert "own.py:Own proposed a point outside the space: x: 1.5 is not within 0.0..1.0" in ended.failure.message
    assert "{'x': 1.5}" in ended.failure.hint


def test_a_proposer_that_raised_fails_the_study_with_its_traceback(stage: TuneStage) -> None:
    run = learning(stage, proposer="own.py:Own")
    failure = Failure(code="proposer-failed", message="own.py:Own raised KeyError", traceback="Traceback: here")
    take(stage, run, failure=failure)
    stage.play(run, first_rounds_best)
    assert stage.run(run).status == "failed" and stage.run(run).failure == failure


def test_an_answer_to_other_terms_or_from_before_is_dropped(stage: TuneStage) -> None:
    run = learning(stage)
    study, terms = stage.study(run), stage.study(run).terms
    answer = Proposed(number=1, proposals=points(0.25))
    stage.core.take_proposals(run, terms, 3, 1, answer)
    assert len(study.trials) == NUM_FIRST_RANDOM
    stage.core.take_proposals(run, terms, NUM_FIRST_RANDOM, 1, answer)
    stage.core.take_proposals(run, terms, NUM_FIRST_RANDOM, 1, answer)  # told twice is once
    assert len(study.trials) == NUM_FIRST_RANDOM + 1


def test_points_are_asked_for_ahead_only_where_trials_are_short() -> None:
    """ray#46965: workers are left idle because one trial may be pending."""
    stage = TuneStage(node(2))
    run = stage.tune(proposer="tpe", scheduler="none", trials=100)
    stage.play(run, first_rounds_best, most=NUM_FIRST_RANDOM)
    stage.all_ready(run)
    assert stage.core.wants == {run: 2}, "one for each free worker: trials take a second"
    take(stage, run, *points(0.1, 0.2))
    worker = next(iter(stage.grants(run)))
    stage.end_slice(run, worker, "finished")
    assert stage.core.wants == {run: 1}


def test_of_short_trials_as_many_are_asked_for_ahead_as_run(stage: TuneStage) -> None:
    run = stage.tune(proposer="tpe", scheduler="none", trials=100)

    def end_short(worker: int) -> None:
        grant = stage.grants(run)[worker]
        result = Result(outcome="finished", rounds=1, metrics={"loss": 1.0}, curve=((1, 1.0),), worked_s=0.01)
        event = ev.SliceEnded(run=run, attempt=1, index=worker, number=grant.number, result=result)
        stage.core.agent_event(event)
        stage.turn()

    stage.all_ready(run)
    while stage.grants(run):
        end_short(next(iter(stage.grants(run))))
    assert stage.core.wants == {run: 2}
    take(stage, run, *points(0.1, 0.2))
    assert stage.core.wants == {run: 2}, "both run, and two more are to be at hand"
    take(stage, run, *points(0.3, 0.4))
    assert run not in stage.core.wants and len(stage.study(run).waiting) == 2
    end_short(next(iter(stage.grants(run))))
    assert stage.core.wants == {run: 1} and len(stage.grants(run)) == 2
    assert MOST_AHEAD <= 64
