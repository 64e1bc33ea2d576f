"""What a trial's worker counts, refuses and says, and where a slice of it ends."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from trial_stage import TrialStage, slice_of, told

import racimo
from racimo.spec.errors import RacimoError
from racimo.worker.tune.numbers import numbers, step_number
from racimo.worker.tune.trial import MAX_METRICS, TrialLeft


@pytest.fixture
def stage(tmp_path: Path) -> TrialStage:
    return TrialStage(tmp_path)


def reporting(*values: float) -> Any:
    def train(config: dict[str, Any]) -> None:
        for value in values:
            racimo.current_run().report(loss=value)

    return train


def test_a_plain_function_is_left_in_the_report_that_ends_its_slice(stage: TrialStage) -> None:
    result = stage.call(reporting(3.0, 2.0, 1.0), slice_of(until=2))
    assert told(result) == {"outcome": "reached", "rounds": 2}
    assert result.curve == ((1, 3.0), (2, 2.0))
    assert result.metrics == {"loss": 2.0}
    assert stage.written == result  # before it was said


def test_the_same_function_goes_on_in_place_where_its_next_slice_is_its_workers(stage: TrialStage) -> None:
    stage.following = [slice_of(until=3, number=2, rounds=1)]
    result = stage.call(reporting(3.0, 2.0, 1.0, 0.0), slice_of(until=1))
    assert [one.rounds for one in stage.results] == [1, 3]
    assert result.curve == ((2, 2.0), (3, 1.0))


def test_a_number_that_is_returned_is_the_metric(stage: TrialStage) -> None:
    result = stage.call(lambda config: config["x"] * 2)
    assert told(result) == {"outcome": "finished", "rounds": 1}
    assert result.metrics == {"loss": 1.0}
    assert [report.values for report in stage.reports] == [{"loss": 1.0}]


def test_what_is_returned_after_reports_is_the_newest_value_and_no_further_round(stage: TrialStage) -> None:
    def train(config: dict[str, Any]) -> float:
        reporting(3.0, 2.0)(config)
        return 2.5

    result = stage.call(train)
    assert told(result) == {"outcome": "finished", "rounds": 2}
    assert result.metrics == {"loss": 2.5}


def test_metrics_reported_one_by_one_are_of_one_step(stage: TrialStage) -> None:
    def train(config: dict[str, Any]) -> None:
        run = racimo.current_run()
        for epoch in range(3):
            run.report(accuracy=0.1 * epoch)
            run.report(loss=3.0 - epoch)

    result = stage.call(train)
    assert [report.step for report in stage.reports] == [1, 1, 2, 2, 3, 3]
    assert result.rounds == 3
    assert result.metrics == {"accuracy": 0.2, "loss": 1.0}


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_ends_the_trial_at_once(stage: TrialStage, worst: float) -> None:
    """ray#6659: the NaN trial itself ran on to the end."""
    result = stage.call(reporting(3.0, worst, 1.0), slice_of(until=10))
    assert told(result) == {"outcome": "diverged", "rounds": 2}
    assert result.metrics == {}
    assert result.curve == ((1, 3.0),)
    assert len(stage.reports) == 2


def test_a_returned_nan_is_a_diverged_trial(stage: TrialStage) -> None:
    assert stage.call(lambda config: float("nan")).outcome == "diverged"


def test_a_function_that_never_told_the_metric_has_failed(stage: TrialStage) -> None:
    def train(config: dict[str, Any]) -> None:
        racimo.current_run().report(accuracy=0.5)

    failure = stage.call(train).failure
    assert failure is not None
    assert failure.code == "metric-missing"
    assert "it reported accuracy" in failure.message


def test_nothing_is_said_once_a_trial_was_left_however_the_function_goes_on(stage: TrialStage) -> None:
    """syne-tune#214: a result filed under another trial."""
    held = []

    def train(config: dict[str, Any]) -> None:
        run = racimo.current_run()
        held.append(run)
        for _ in range(3):
            try:
                run.report(loss=1.0)
            except BaseException:  # noqa: BLE001, S110 - as careless user code does
                pass

    result = stage.call(train, slice_of(until=1))
    assert told(result) == {"outcome": "reached", "rounds": 1}
    assert len(stage.reports) == 1
    with stage.begun(slice_of(trial=7, number=2)):
        with pytest.raises(TrialLeft):
            held[0].report(loss=2.0)
        assert racimo.current_run() is not held[0]
    assert {report.trial for report in stage.reports} == {0}


def test_several_threads_report_and_each_report_counts_once(stage: TrialStage) -> None:
    def train(config: dict[str, Any]) -> None:
        run = racimo.current_run()

        def work(first: int) -> None:
            for step in range(first, 400, 4):
                run.report(step=step, loss=float(step))

        threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    result = stage.call(train)
    assert result.rounds == 400
    assert sorted(report.step for report in stage.reports) == list(range(400))


def test_a_report_from_a_forked_process_is_refused_and_counts_nothing(stage: TrialStage) -> None:
    def train(config: dict[str, Any]) -> float:
        pid = os.fork()
        if pid == 0:
            try:
                racimo.current_run().report(loss=9.0)
            except RacimoError as error:
                os._exit(7 if error.code == "steps-misused" else 1)
            os._exit(2)
        return float(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    assert stage.call(train, slice_of(until=1)).metrics == {"loss": 7.0}


def test_a_worker_that_is_to_leave_ends_the_slice_at_the_next_report(stage: TrialStage) -> None:
    stage.asked_to_leave = True
    assert told(stage.call(reporting(3.0, 2.0))) == {"outcome": "halted", "rounds": 1}


def test_a_failure_with_half_a_surrogate_pair_can_be_told(stage: TrialStage) -> None:
    from racimo.state.nouns import Failure

    stage.trial().fail(Failure(code="worker-raised", message="file \udcff.txt"))
    assert stage.written is not None
    assert stage.written.failure is not None
    assert stage.written.failure.message == "file \\udcff.txt"


def test_a_trial_reports_under_so_many_names_and_no_more(stage: TrialStage) -> None:
    trial = stage.trial()
    trial.report(1, {f"m{i}": 0.0 for i in range(MAX_METRICS)})
    with pytest.raises(RacimoError, match="1000 different metrics"):
        trial.report(2, {"z": 0.0})


@pytest.mark.parametrize(
    "value", [numpy.float32(0.5), numpy.array(0.5), torch.tensor(0.5), torch.tensor([0.5]), True, 3, numpy.int64(2)]
)
def test_scalars_of_any_library_are_numbers(value: Any) -> None:
    assert numbers({"loss": value}) == {"loss": float(value)}
    assert type(numbers({"loss": value})["loss"]) is float


@pytest.mark.parametrize("value", ["0.5", None, [1.0], torch.zeros(2), 1j, 10**400, object()])
def test_what_is_no_number_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(RacimoError, match=r"^loss was reported as") as caught:
        numbers({"loss": value})
    assert caught.value.code == "metric-invalid"


@pytest.mark.parametrize("name", ["", "x" * 201, "\ud800"])
def test_a_name_that_cannot_be_stored_is_refused(name: str) -> None:
    with pytest.raises(RacimoError, match="no name of a metric"):
        numbers({name: 1.0})


def test_steps_are_whole_numbers_of_any_library() -> None:
    assert step_number(numpy.int64(3)) == 3
    for wrong in (1.5, "3", -1, None, 2**63):
        with pytest.raises(RacimoError, match="no whole number"):
            step_number(wrong)
