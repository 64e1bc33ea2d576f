"""A client's table of trials: who leads, the front, the way there, and how much each parameter matters."""

import math

import msgspec
from study_views import TERMS, drawn, failed, table_of, trial

from racimo.agent.protocol import Report
from racimo.client.importance import LEAST_TRIALS, importance
from racimo.control.views import StudyView
from racimo.spec.study import StudySpec
from racimo.state.events import Record, SliceEnded, SliceGranted
from racimo.state.nouns import Reason
from racimo.state.trials import Grant, Result

LATENCY = StudySpec(space=TERMS.space, metric=("max accuracy", "latency_ms"), limits=("latency_ms <= 50",))


def test_the_best_are_ranked_and_who_diverged_or_failed_is_not_among_them() -> None:
    """ray#6659: a value that is not finite never counts as good."""
    table = table_of(
        trial(0, metrics={"loss": 0.5}),
        trial(1, metrics={"loss": 0.1}, status="diverged"),
        trial(2, metrics={"loss": math.nan}),
        trial(3, metrics={"loss": 0.2}, status="paused"),
        failed(4),
    )
    assert [one.number for one in table.top(9)] == [3, 0]


def test_a_trial_that_does_not_meet_a_limit_or_has_not_told_its_metric_does_not_count() -> None:
    table = table_of(
        trial(0, metrics={"accuracy": 0.99, "latency_ms": 80.0}),
        trial(1, metrics={"accuracy": 0.90, "latency_ms": 20.0}),
        trial(2, metrics={"accuracy": 0.95}),
        terms=LATENCY,
    )
    assert [one.number for one in table.top(9)] == [1]


def test_the_front_is_what_no_other_trial_beats() -> None:
    places = [(0.9, 10.0), (0.95, 20.0), (0.94, 30.0), (0.8, 10.0), (0.95, 20.0), (0.5, 5.0)]
    trials = [trial(i, metrics={"accuracy": a, "latency_ms": ms}) for i, (a, ms) in enumerate(places)]
    assert {one.number for one in table_of(*trials, terms=LATENCY).front} == {0, 1, 4, 5}


def test_the_history_keeps_the_best_so_far_and_counts_device_time_of_trials_that_told_nothing() -> None:
    table = table_of(trial(0), failed(1), trial(2, metrics={"loss": 0.7}), trial(3, metrics={"loss": 0.3}))
    history = table.history
    assert [point.best for point in history] == [0.5, 0.5, 0.3]
    assert [point.device_s for point in history] == [2.0, 6.0, 8.0]


def test_the_way_follows_slices_as_they_ended_not_as_trials_are_numbered() -> None:
    table = table_of(trial(0, metrics={"loss": 0.2}), trial(1, metrics={"loss": 0.4}))
    reason = Reason(code="x", text="x")
    happened = [(1, 0, 0.9), (2, 1, 0.4), (3, 0, 0.2)]
    records = []
    for number, of_trial, loss in happened:
        grant = Grant(number=number, trial=of_trial, worker=0)
        result = Result(outcome="reached", rounds=1, metrics={"loss": loss}, worked_s=10.0)
        records.append(SliceGranted(run="r", attempt=1, grant=grant, reason=reason))
        records.append(SliceEnded(run="r", attempt=1, index=0, number=number, result=result))
    way = table.way([Record(seq=i, at_s=0.0, wall_s=0.0, event=event) for i, event in enumerate(records)], 2)
    assert [(point.trial, point.best, point.device_s) for point in way] == [(0, 0.9, 20), (1, 0.4, 40), (0, 0.2, 60)]


def test_only_trials_whose_status_changed_are_news() -> None:
    table = table_of(trial(0, status="running"), trial(1))
    news = table.take(StudyView(seq=8, trials=(trial(0), trial(1, rounds=8), trial(2, status="waiting"))))
    assert [one.number for one in news] == [0, 2]
    assert table.newest.seq == 8 and not table.newest.trials


def test_a_running_trial_is_shown_where_its_newest_report_is() -> None:
    table = table_of(trial(0, status="running", rounds=1, metrics={"loss": 0.9}), trial(1))
    table.hear([Report(step=step, values={"loss": 1.0 / step}, trial=0) for step in (1, 2, 4)])
    table.hear([Report(step=9, values={"loss": 0.0}, trial=1), Report(step=1, values={"loss": 0.0}, trial=7)])
    assert (table.trials[0].rounds, table.trials[0].metrics) == (3, {"loss": 0.25})
    assert table.trials[1].metrics == {"loss": 0.5} and 7 not in table.trials


def test_the_parameter_that_decides_is_the_most_important_one() -> None:
    found = importance(drawn(200, lambda values: abs(math.log10(values["lr"]) + 3) + 0.01 * values["width"] / 64))  # type: ignore[arg-type, operator]
    assert found[0].name == "lr" and (found[0].share or 0) > 0.5
    assert math.isclose(sum(one.share or 0.0 for one in found), 1.0)


def test_a_choice_that_decides_is_found_too() -> None:
    found = importance(drawn(120, lambda values: 1.0 if values["optimizer"] == "sgd" else 0.1))
    assert found[0].name == "optimizer"


def test_trials_of_different_length_are_compared_by_how_far_they_came() -> None:
    """A pruned trial's value after one round may look better than that of a survivor after nine; it is not."""
    table = drawn(200, lambda values: abs(math.log10(values["lr"]) + 3))  # type: ignore[arg-type]
    early = [
        msgspec.structs.replace(one, rounds=1, status="stopped", metrics={"loss": 0.0})
        if one.metrics["loss"] > 0.5
        else one
        for one in table.trials.values()
    ]
    assert importance(table_of(*early))[0].name == "lr"


def test_nothing_is_said_of_a_parameter_that_few_trials_had() -> None:
    found = importance(drawn(LEAST_TRIALS - 1, lambda values: 0.5))
    assert all(one.share is None for one in found) and found[0].num_trials <= LEAST_TRIALS


def test_values_from_before_the_space_was_narrowed_are_left_out_of_it() -> None:
    narrow = msgspec.structs.replace(TERMS, space=TERMS.space | {"lr": "log 1e-4..1e-2"})
    table = drawn(100, lambda values: 0.5).under(narrow)
    assert next(one for one in importance(table) if one.name == "lr").num_trials < 100
