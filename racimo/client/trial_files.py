"""Trials as rows, and rows as CSV or Parquet files. Of a training run: what it reported, step by step."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from racimo.agent.protocol import Report
from racimo.client.trial_table import TrialTable
from racimo.control.views import TrialView
from racimo.spec.errors import RacimoError

SUFFIXES = (".csv", ".parquet")

Row = dict[str, object]


def trial_rows(table: TrialTable) -> list[Row]:
    """One row for each trial, by number. Parameters are `config.NAME`, metrics `metric.NAME`."""
    parameters = dict.fromkeys((*table.space.parameters, *(n for t in table.trials.values() for n in t.values)))
    metrics = dict.fromkeys(
        (*(objective.metric for objective in table.objectives), *(n for t in table.trials.values() for n in t.metrics))
    )
    return [_trial_row(trial, parameters, metrics) for _, trial in sorted(table.trials.items())]


def _trial_row(trial: TrialView, parameters: Iterable[str], metrics: Iterable[str]) -> Row:
    why = trial.failure.message if trial.failure is not None else trial.reason.text if trial.reason is not None else ""
    return {
        "trial": trial.number,
        "status": trial.status,
        "by": trial.by,
        "rounds": trial.rounds,
        "step": trial.step,
        **{f"metric.{name}": trial.metrics.get(name) for name in metrics},
        **{f"config.{name}": trial.values.get(name) for name in parameters},
        "device_s": trial.device_s,
        "cost": trial.cost,
        "retries": trial.retries,
        "why": why,
    }


def report_rows(reports: Sequence[Report]) -> list[Row]:
    """One row for each report; trials of a tune run are named."""
    names = dict.fromkeys(name for report in reports for name in report.values)
    of_trials = any(report.trial is not None for report in reports)
    return [
        ({"trial": report.trial} if of_trials else {})
        | {"step": report.step}
        | {name: report.values.get(name) for name in names}
        for report in reports
    ]


def write_rows(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """A file `.csv` or `.parquet`, which appears whole or not at all.

    `RacimoError`: `invalid-request` for another kind of file, `extra-missing`, `file-unreadable`."""
    check_rows_file(path)
    draft = path.with_name(f".{path.name}.new")
    try:
        if path.suffix == ".csv":
            draft.write_text(as_csv(rows), newline="")
        else:
            _write_parquet(rows, draft)
        draft.replace(path)
    except OSError as error:
        raise RacimoError("file-unreadable", f"cannot write {path}: {error.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)


def check_rows_file(path: Path) -> None:
    """`RacimoError`: `invalid-request` for a name of another kind of file."""
    if path.suffix not in SUFFIXES:
        raise RacimoError("invalid-request", f"trials are exported to a file .csv or .parquet, not {path.name}")


def as_csv(rows: Sequence[Mapping[str, object]]) -> str:
    """With a line of names first. What is not known is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _write_parquet(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise RacimoError(
            "extra-missing", "Parquet is written by pyarrow, which is not installed here (.csv needs nothing)",
            "pip install 'racimo[tune]'",
        ) from None  # fmt: skip
    names = list(rows[0]) if rows else []
    columns = {name: _column([row[name] for row in rows]) for name in names}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def _column(values: list[object]) -> list[object]:
    """A column of one type: numbers as floats where they are mixed, all else that is mixed as text."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1:
        return values
    if kinds == {int, float}:
        return [float(value) if isinstance(value, int) else value for value in values]
    return [None if value is None else str(value) for value in values]
