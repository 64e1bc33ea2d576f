"""Trials and reports for other programs: CSV, Parquet, Optuna, TensorBoard, MLflow."""

import csv
import io
import math
from pathlib import Path

import pytest
from study_views import TERMS, drawn, failed, run_view, table_of, trial

from racimo.agent.protocol import Report
from racimo.client.optuna_export import export_to_optuna
from racimo.client.reading import follow_into
from racimo.client.trackers import MLflowExperiment, Series, TensorBoardFolder, run_series, trial_series
from racimo.client.trial_files import as_csv, report_rows, trial_rows, write_rows
from racimo.control.views import ReportsView, RunView, StudyView
from racimo.spec.errors import RacimoError
from racimo.spec.run import RunSpec
from racimo.spec.study import StudySpec

TWO = StudySpec(space=TERMS.space, metric=("loss", "max accuracy"), trials=100)
MIXED = table_of(
    trial(0, {"lr": 0.01, "width": 8, "optimizer": "adam", "beta": 0.9}, curve=((1, 0.9), (3, 0.5))),
    trial(1, status="stopped", rounds=1, curve=((1, 0.9),), metrics={"loss": 0.9, "top5": 0.7}),
    trial(2, status="diverged", metrics={"loss": math.nan}),
    failed(3),
    trial(4, status="waiting", metrics={}, rounds=0),
)


def test_a_table_has_a_row_for_each_trial_and_a_column_for_whatever_was_told() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(trial_rows(MIXED)))))
    assert [row["trial"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows[0]["config.beta"] == "0.9" and rows[1]["config.beta"] == ""
    assert rows[1]["metric.top5"] == "0.7" and rows[3]["why"] == "ValueError: width is odd"


def test_a_parameter_called_like_a_column_is_another_column() -> None:
    terms = StudySpec(space={"rounds": "1..9", "status": ["a", "b"]}, metric="loss")
    (row,) = trial_rows(table_of(trial(0, {"rounds": 4, "status": "a"}), terms=terms))
    assert (row["rounds"], row["config.rounds"], row["status"], row["config.status"]) == (9, 4, "finished", "a")


def test_reports_of_a_training_run_are_rows_by_step() -> None:
    reports = [Report(step=1, values={"loss": 2.0}), Report(step=2, values={"loss": 1.0, "lr": 0.1})]
    assert report_rows(reports) == [{"step": 1, "loss": 2.0, "lr": None}, {"step": 2, "loss": 1.0, "lr": 0.1}]


def test_an_empty_study_is_an_empty_file(tmp_path: Path) -> None:
    write_rows(trial_rows(table_of()), tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text().strip() == ""


def test_a_file_that_cannot_be_written_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "x.csv").mkdir()
    with pytest.raises(RacimoError) as caught:
        write_rows([{"a": 1}], tmp_path / "x.csv")
    assert caught.value.code == "file-unreadable"
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]


def test_parquet_keeps_numbers_numbers_and_says_what_is_missing(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write_rows([*trial_rows(MIXED)], tmp_path / "x.parquet")
    read = parquet.read_table(tmp_path / "x.parquet").to_pydict()
    assert read["config.width"] == [8, 32, 32, 32, 32] and read["config.beta"][1] is None
    assert read["metric.loss"][0] == 0.5 and math.isnan(read["metric.loss"][2])


def test_a_choice_of_texts_and_numbers_is_a_column_of_text_in_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write_rows([{"a": "none", "b": 1}, {"a": 3, "b": 2.5}, {"a": None, "b": None}], tmp_path / "x.parquet")
    read = parquet.read_table(tmp_path / "x.parquet").to_pydict()
    assert read == {"a": ["none", "3", None], "b": [1.0, 2.5, None]}


def test_optuna_finds_the_same_best_trial_with_its_rounds(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    storage = f"sqlite:///{tmp_path / 'studies.db'}"
    assert export_to_optuna(MIXED, "digits-1", storage) == (4, 1)
    study = optuna.load_study(study_name="digits-1", storage=storage)
    assert study.best_trial.user_attrs["racimo.trial"] == 0 and study.best_value == 0.5
    assert study.best_trial.intermediate_values == {1: 0.9, 3: 0.5}
    assert [one.state.name for one in study.trials] == ["COMPLETE", "PRUNED", "FAIL", "FAIL"]
    with pytest.raises(RacimoError, match="has a study digits-1 already"):
        export_to_optuna(MIXED, "digits-1", storage)


def test_optuna_gets_both_directions_of_two_metrics(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    storage = f"sqlite:///{tmp_path / 'studies.db'}"
    export_to_optuna(table_of(trial(0, metrics={"loss": 0.1, "accuracy": 0.9}), terms=TWO), "two", storage)
    study = optuna.load_study(study_name="two", storage=storage)
    assert [direction.name for direction in study.directions] == ["MINIMIZE", "MAXIMIZE"]
    assert study.best_trials[0].values == [0.1, 0.9]


def test_every_point_of_the_space_is_one_for_optuna(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    odd = StudySpec(space={"a": "1..10 step 4", "b": "0.0..1.0 step 0.3", "c": [1, "x", True, None], "d": "log 1..9"},
                    metric="loss")  # fmt: skip
    assert export_to_optuna(drawn(60, lambda values: 0.5, odd), "odd", f"sqlite:///{tmp_path / 'x.db'}") == (60, 0)


def test_a_storage_that_is_none_is_said_in_a_sentence() -> None:
    pytest.importorskip("optuna")
    with pytest.raises(RacimoError, match="Optuna cannot write to nonsense"):
        export_to_optuna(MIXED, "x", "nonsense")


def reports_of(number: int) -> list[Report]:
    """What trial 0 and 1 of `MIXED` told, and 2, which diverged."""
    losses = {0: ((1, 0.9), (3, 0.5)), 1: ((1, 0.9),), 2: ((1, math.nan),), 3: ()}[number]
    return [Report(step=step, values={"loss": loss, "top5": 1 - loss}, trial=number) for step, loss in losses]


def test_a_trial_is_a_series_of_its_reports() -> None:
    series = trial_series(run_view(), MIXED.trials[1], reports_of(1))
    assert series.values == ((1, "loss", 0.9), (1, "top5", 1 - 0.9)) and series.status == "stopped"
    assert trial_series(run_view(), MIXED.trials[2], reports_of(2)).values == ()
    running = trial(9, status="running")
    assert trial_series(run_view(), running).status == ""
    assert trial_series(run_view("stopped"), running).status == "running"


def test_trials_are_followed_into_a_tracker_until_the_study_has_ended() -> None:
    """Of each, what was new; at the end, how each that was paused ended too."""
    told: list[Series] = []

    class Told:
        def put(self, series: Series) -> None:
            told.append(series)

    class Cluster:
        looks = 0

        def run(self, run: str) -> RunView:
            self.looks += 1
            return run_view("running" if self.looks < 3 else "succeeded")

        def trials(self, run: str, after: int, wait_s: float) -> StudyView:
            first = trial(0, status="running" if after < 0 else "paused")
            return StudyView(seq=self.looks, trials=(first,) if self.looks < 3 else (trial(1),))

        def reports(self, run: str, after: int) -> ReportsView:
            lines = (*reports_of(0), *reports_of(1))[: self.looks]
            return ReportsView(next=max(after, len(lines)), reports=lines[after:])

    assert follow_into(Cluster(), run_view(), Told(), until_ended=True, look_s=0.0) == 2  # type: ignore[arg-type]
    assert [(one.name, len(one.values), one.status) for one in told] == [
        ("trial-0", 2, ""), ("trial-0", 4, ""), ("trial-0", 4, "paused"), ("trial-1", 2, "finished"),
    ]  # fmt: skip


def training(status: str, *reports: Report) -> Series:
    spec = RunSpec(train="t.py:train", config={"lr": 0.1, "model": {"width": 8}})
    view = RunView(id="gpt-1", kind="train", status=status, spec=spec, submitted_wall_s=0.0)
    return run_series(view, reports)


def test_a_training_run_is_a_series_of_its_reports() -> None:
    series = training("running", Report(step=20, values={"loss": 1.0}), Report(step=10, values={"loss": 2.0}))
    assert series.values == ((10, "loss", 2.0), (20, "loss", 1.0))
    assert series.parameters == {"lr": 0.1, "model.width": 8}


def test_tensorboard_reads_what_was_written_once_however_often_it_was_told(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for _ in range(2):  # exported twice
        folder = TensorBoardFolder(tmp_path)
        folder.put(training("running", Report(step=10, values={"loss": 2.0})))
        folder.put(training("succeeded", Report(step=10, values={"loss": 2.0}), Report(step=20, values={"loss": 1.0})))
        folder.put(trial_series(run_view(), MIXED.trials[0], reports_of(0)))
        folder.close()
    accumulator = reading.EventAccumulator(str(tmp_path / "gpt-1"))
    accumulator.Reload()
    assert [(one.step, one.value) for one in accumulator.Scalars("loss")] == [(10, 2.0), (20, 1.0)]
    trial_events = reading.EventAccumulator(str(tmp_path / "digits-1" / "trial-0"))
    trial_events.Reload()
    assert [one.step for one in trial_events.Scalars("loss")] == [1, 3]


def test_mlflow_has_a_run_for_each_trial_and_an_export_repeated_adds_only_what_is_new(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    uri = f"sqlite:///{tmp_path / 'm.db'}"
    for _ in range(2):
        experiment = MLflowExperiment(uri, "digits-1")
        for number in (0, 1, 3):
            experiment.put(trial_series(run_view(), MIXED.trials[number], reports_of(number)))
        experiment.close()
    client = tracking.MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name("digits-1")
    runs = {run.data.tags["racimo.key"]: run for run in client.search_runs([found.experiment_id])}
    assert set(runs) == {"digits-1/0", "digits-1/1", "digits-1/3"}
    history = client.get_metric_history(runs["digits-1/0"].info.run_id, "loss")
    assert sorted((one.step, one.value) for one in history) == [(1, 0.9), (3, 0.5)]
    assert runs["digits-1/0"].data.params["optimizer"] == "adam"
    assert [runs[f"digits-1/{n}"].info.status for n in (0, 1, 3)] == ["FINISHED", "KILLED", "FAILED"]
