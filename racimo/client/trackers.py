"""What runs report, to the trackers that people have: MLflow and TensorBoard. Copies: nothing is ever read back.

A `Series` is all that is known of one training run or one trial; told again with more points, only those are written.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from racimo.agent.protocol import Report
from racimo.control.views import RunView, TrialView
from racimo.spec.errors import RacimoError
from racimo.spec.space import Scalar
from racimo.state.nouns import ENDED
from racimo.state.trials import OVER

MAX_OPEN_FILES = 64
"""Event files of TensorBoard that are held open; each has a thread of its own."""
MAX_BATCH = 900
"""Of metrics in one request to MLflow; it takes 1,000."""
MAX_PARAMETERS_BATCH = 100

Value = tuple[int, str, float]
"""(step, metric, value), steps of a metric ascending."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """`status` is how it ended, "" while it goes on."""

    key: str
    name: str
    parameters: dict[str, Scalar]
    values: tuple[Value, ...]
    status: str = ""


class Tracker(Protocol):
    """`put` writes what is new in a series; `close` ends all files and connections."""

    def put(self, series: Series) -> None: ...

    def close(self) -> None: ...


def trial_series(run: RunView, trial: TrialView, reports: Sequence[Report] = ()) -> Series:
    """`reports`: its own, of all metrics."""
    return Series(
        key=f"{run.id}/{trial.number}",
        name=f"trial-{trial.number}",
        parameters=dict(trial.values),
        values=_values(reports),
        status=trial.status if trial.status in OVER or run.status in ENDED else "",
    )


def run_series(run: RunView, reports: Sequence[Report]) -> Series:
    """Of a training run: what its workers reported, step by step."""
    return Series(
        key=run.id,
        name=run.id,
        parameters=dict(_flat(run.spec.config)),
        values=_values(reports),
        status=run.status if run.status in ENDED else "",
    )


def _values(reports: Sequence[Report]) -> tuple[Value, ...]:
    told = ((report.step, name, value) for report in reports for name, value in report.values.items())
    return tuple(sorted(one for one in told if math.isfinite(one[2])))


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Scalar]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, bool | int | float | str) else str(value)


class _Written:
    """How far each metric of each series is written."""

    def __init__(self) -> None:
        self.upto: dict[tuple[str, str], int] = {}

    def fresh(self, series: Series) -> list[Value]:
        fresh = [one for one in series.values if one[0] > self.upto.get((series.key, one[1]), -1)]
        for step, metric, _ in fresh:
            self.upto[series.key, metric] = step
        return fresh


class TensorBoardFolder:
    """A folder of event files for `tensorboard --logdir FOLDER`: one below it for each run, in it one for each trial.

    What an earlier export wrote of the same series is replaced. `RacimoError`: `extra-missing`, `file-unreadable`."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise RacimoError(
                "extra-missing", "event files are written by TensorBoard, which is not installed here",
                "pip install 'racimo[tensorboard]'",
            ) from None  # fmt: skip
        self._open_file = EventFileWriter
        self._folder = folder
        self._files: OrderedDict[str, Any] = OrderedDict()
        self._begun: set[str] = set()
        self._written = _Written()

    def put(self, series: Series) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import summary_v2 as hparams

        fresh = self._written.fresh(series)
        begins = series.key not in self._begun
        if not fresh and not begins:
            return
        try:
            file = self._file(series)
            if begins and series.parameters:
                texts = {name: "none" if value is None else value for name, value in series.parameters.items()}
                file.add_event(Event(wall_time=time.time(), summary=hparams.hparams_pb(texts, trial_id=series.key)))
            for step, metric, value in fresh:
                summary = Summary(value=[Summary.Value(tag=metric, simple_value=value)])
                file.add_event(Event(wall_time=time.time(), step=step, summary=summary))
            file.flush()
        except OSError as error:
            raise RacimoError("file-unreadable", f"cannot write to {self._folder}: {error.strerror}") from None

    def _file(self, series: Series) -> Any:
        if series.key in self._files:
            self._files.move_to_end(series.key)
            return self._files[series.key]
        while len(self._files) >= MAX_OPEN_FILES:
            self._files.popitem(last=False)[1].close()
        folder = self._folder / series.key.partition("/")[0]
        folder = folder / series.name if "/" in series.key else folder
        if series.key not in self._begun:
            self._begun.add(series.key)
            for earlier in folder.glob("events.out.tfevents.*") if folder.is_dir() else ():
                earlier.unlink()
        self._files[series.key] = self._open_file(str(folder))
        return self._files[series.key]

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


class MLflowExperiment:
    """An experiment of MLflow, by the name of the run: one run of MLflow's for each trial, or one for a training run.

    Exported again, what is missing there is added. `uri`: of the tracking server or store.
    `RacimoError`: `extra-missing`, `invalid-request` with MLflow's own words."""

    def __init__(self, uri: str, name: str) -> None:
        try:
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise RacimoError("extra-missing", "MLflow is not installed here", "pip install 'racimo[mlflow]'") from None
        self._refusal = MlflowException
        self._written = _Written()
        self._runs: dict[str, str] = {}
        self._ended: set[str] = set()
        try:
            self._client = MlflowClient(tracking_uri=uri)
            found = self._client.get_experiment_by_name(name)
            self._experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
            self._find_runs()
        except MlflowException as error:
            raise self._refused(error) from None

    def _find_runs(self) -> None:
        token: str | None = None
        while True:
            page = self._client.search_runs([self._experiment], page_token=token)
            for run in page:
                if key := run.data.tags.get("racimo.key"):
                    self._runs[key] = run.info.run_id
                    for metric in run.data.metrics:
                        history = self._client.get_metric_history(run.info.run_id, metric)
                        self._written.upto[key, metric] = max(one.step for one in history)
            token = page.token
            if not token:
                return

    def put(self, series: Series) -> None:
        from mlflow.entities import Metric, Param

        try:
            run = self._runs.get(series.key)
            if run is None:
                tags = {"racimo.key": series.key}
                made = self._client.create_run(self._experiment, run_name=series.name, tags=tags)
                run = self._runs[series.key] = made.info.run_id
                params = [Param(name, str(value)) for name, value in series.parameters.items()]
                for begin in range(0, len(params), MAX_PARAMETERS_BATCH):
                    self._client.log_batch(run, params=params[begin : begin + MAX_PARAMETERS_BATCH])
            now_ms = int(time.time() * 1000)
            metrics = [Metric(name, value, now_ms, step) for step, name, value in self._written.fresh(series)]
            for begin in range(0, len(metrics), MAX_BATCH):
                self._client.log_batch(run, metrics=metrics[begin : begin + MAX_BATCH])
            if series.status and series.key not in self._ended:
                self._ended.add(series.key)
                self._client.set_tag(run, "racimo.status", series.status)
                self._client.set_terminated(run, status=_mlflow_status(series.status))
        except self._refusal as error:
            raise self._refused(error) from None

    def close(self) -> None:
        """Nothing is held."""

    def _refused(self, error: Exception) -> RacimoError:
        return RacimoError("invalid-request", f"MLflow: {str(error).splitlines()[0]}")


def _mlflow_status(status: str) -> str:
    if status in ("failed", "diverged", "lost"):
        return "FAILED"
    return "FINISHED" if status in ("finished", "succeeded") else "KILLED"
