"""What is tuned: the 34 tasks of LCBench (a surrogate that knows every configuration) and 12 of TaskSet (a table of
1,000 configurations each), read from the folder with the shared data; see its README for sources and licences.
"""

import csv
import functools
import json
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.peers import PeerMissing

DATA = Path(os.environ.get("BENCH_DATA", Path(__file__).parent.parent.parent.parent / "shared" / "data")) / "tune"
SURROGATE_THREADS = 1
MAX_CACHED_CURVES = 20_000

Values = dict[str, Any]


class Dimension(Protocol):
    """Of a space, as every system can write it: `kind` is "float" or "int"."""

    name: str
    kind: str
    low: float
    high: float
    log: bool


class Range:
    def __init__(self, name: str, kind: str, low: float, high: float, log: bool) -> None:
        self.name, self.kind, self.low, self.high, self.log = name, kind, low, high, log

    def at(self, unit: float) -> float | int:
        """The value at a position in [0, 1)."""
        if self.log:
            value = float(np.exp(np.log(self.low) + unit * (np.log(self.high) - np.log(self.low))))
        else:
            value = self.low + unit * (self.high - self.low)
        value = min(max(value, self.low), self.high)
        return round(value) if self.kind == "int" else value

    def unit_of(self, value: float) -> float:
        if self.log:
            return float((np.log(value) - np.log(self.low)) / (np.log(self.high) - np.log(self.low)))
        return float((value - self.low) / (self.high - self.low))


class Curve:
    """Of one configuration: `values[r - 1]` is its loss after round r, less being better, NaN where it diverged;
    `seconds[r - 1]` what that round takes."""

    def __init__(self, values: np.ndarray, seconds: np.ndarray) -> None:
        self.values = values.tolist()
        self.seconds = seconds.tolist()


class Objective(Protocol):
    """One task. `best` and `worst`: losses that are regret 0 and 1."""

    name: str
    space: tuple[Range, ...]
    rounds: int
    best: float
    worst: float

    def curve(self, values: Values) -> Curve: ...


def regret(objective: Objective, value: float) -> float:
    return (value - objective.best) / (objective.worst - objective.best)


# LCBench: batch size, learning rate and five more of a funnel-shaped network, 52 epochs


class LCBench:
    """Loss: 100 - validation accuracy. Regret 0 and 1: least and greatest in the statistics beside the surrogate."""

    rounds = 52

    def __init__(self, task: str) -> None:
        self.task, self.name = task, f"lcbench-{task}"
        self.space = _lcbench_space()
        least, most = _lcbench_range(task)
        self.best, self.worst = 100.0 - most, 100.0 - least
        self._cached: dict[tuple[Any, ...], Curve] = {}

    def curve(self, values: Values) -> Curve:
        key = tuple(values[one.name] for one in self.space)
        known = self._cached.get(key)
        if known is None:
            if len(self._cached) >= MAX_CACHED_CURVES:
                self._cached.clear()
            known = self._cached[key] = self.curves([values])[0]
        return known

    def curves(self, many: list[Values]) -> list[Curve]:
        """The surrogate, asked for all epochs of all configurations at once."""
        session = _surrogate()
        epochs = np.arange(1, self.rounds + 1)
        rows = []
        for values in many:
            given = values | {"epoch": 0}
            row = np.array([given[name] for name in LCBENCH_NUMBERS], dtype=np.float32)
            block = np.repeat(row[None, :], self.rounds, axis=0)
            block[:, LCBENCH_NUMBERS.index("epoch")] = epochs
            rows.append(block)
        numbers = np.concatenate(rows)
        kinds = np.full((len(numbers), 1), _lcbench_codes()[self.task], dtype=np.int32)
        names = [one.name for one in session.get_inputs()]
        told = session.run(None, {names[0]: kinds, names[1]: numbers})[0]
        told = told.reshape(len(many), self.rounds, -1)
        time_s = np.maximum.accumulate(told[:, :, LCBENCH_METRICS.index("time")].astype(float), axis=1)
        losses = 100.0 - told[:, :, LCBENCH_METRICS.index("val_accuracy")].astype(float)
        each_s = np.diff(np.maximum(time_s, 1e-6), axis=1, prepend=0.0)
        return [Curve(losses[index], each_s[index]) for index in range(len(many))]


LCBENCH_NUMBERS = (
    "epoch", "batch_size", "learning_rate", "momentum", "weight_decay", "num_layers", "max_units", "max_dropout",
)  # fmt: skip
"""The surrogate's second input, in this order (its first is the task)."""
LCBENCH_METRICS = (
    "time", "val_accuracy", "val_cross_entropy", "val_balanced_accuracy", "test_cross_entropy",
    "test_balanced_accuracy",
)  # fmt: skip


def lcbench_tasks() -> list[str]:
    return list(_lcbench_config()["hyperparameters"][0]["choices"])


@functools.cache
def _lcbench_config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_file("lcbench/config_space.json").read_text())
    return found


def _lcbench_space() -> tuple[Range, ...]:
    numbers = [one for one in _lcbench_config()["hyperparameters"] if one["name"] not in ("OpenML_task_id", "epoch")]
    return tuple(
        Range(one["name"], "int" if one["type"] == "uniform_int" else "float", one["lower"], one["upper"], one["log"])
        for one in numbers
    )


@functools.cache
def _lcbench_codes() -> dict[str, int]:
    found: dict[str, int] = json.loads(_file("lcbench/encoding.json").read_text())["OpenML_task_id"]
    return found


def _lcbench_range(task: str) -> tuple[float, float]:
    with _file("lcbench/target_statistics.csv").open() as file:
        found = {
            row["statistic"]: float(row["value"])
            for row in csv.DictReader(file)
            if row["instance"] == task and row["metric"] == "val_accuracy"
        }
    return found["min"], found["max"]


@functools.cache
def _surrogate() -> Any:
    import onnxruntime  # only the benchmarks' environment has it

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = SURROGATE_THREADS
    return onnxruntime.InferenceSession(str(_file("lcbench/model.onnx")), options, providers=["CPUExecutionProvider"])


# TaskSet: eight numbers of an optimizer, 50 reports of the validation loss


class TaskSet:
    """A proposed point is the table's nearest one, in the cube of (logarithmic) ranges. A round takes a second.
    Regret 0: the least loss in the table. Regret 1: the median of the configurations' least losses."""

    rounds = 50

    def __init__(self, task: str) -> None:
        self.task, self.name = task, f"taskset-{task}"
        self.space, self._units = _taskset_space()
        table = _taskset()[task][:, 1:]  # the first is before training
        self._curves = [Curve(row, np.ones(len(row))) for row in table.astype(float)]
        self.nan_part = float(np.isnan(table).any(axis=1).mean())
        finite = np.where(np.isfinite(table), table, np.inf).min(axis=1)
        self.best, self.worst = float(finite.min()), float(np.median(finite))

    def curve(self, values: Values) -> Curve:
        unit = np.array([one.unit_of(values[one.name]) for one in self.space])
        return self._curves[int(((self._units - unit) ** 2).sum(axis=1).argmin())]


def taskset_tasks() -> list[str]:
    return sorted(_taskset())


@functools.cache
def _taskset() -> dict[str, np.ndarray]:
    with np.load(_file("taskset/taskset12_valid.npz"), allow_pickle=False) as file:
        return {name: file[name] for name in file.files if not name.startswith("hp")}


@functools.cache
def _taskset_space() -> tuple[tuple[Range, ...], np.ndarray]:
    """The table's own ranges; logarithmic where the values span more than a factor of 100."""
    with np.load(_file("taskset/taskset12_valid.npz"), allow_pickle=False) as file:
        names, table = [str(name) for name in file["hp_names"]], file["hp"].astype(float)
    ranges = []
    for name, column in zip(names, table.T, strict=True):
        low, high = float(column.min()), float(column.max())
        ranges.append(Range(name, "float", low, high, low > 0 and high / low > 100))
    units = np.stack(
        [[one.unit_of(value) for value in column] for one, column in zip(ranges, table.T, strict=True)], axis=1
    )
    return tuple(ranges), units


def every_objective() -> list[str]:
    """Their names, as `objective_of` takes them."""
    return [f"lcbench-{task}" for task in lcbench_tasks()] + [f"taskset-{task}" for task in taskset_tasks()]


@functools.cache
def objective_of(name: str) -> Objective:
    kind, _, task = name.partition("-")
    found: Objective = LCBench(task) if kind == "lcbench" else TaskSet(task)
    return found


def _file(path: str) -> Path:
    found = DATA / path
    if not found.exists():
        raise PeerMissing(
            f"{found} is not there: the learning curves are not part of the project (see bench/README.md)"
        )
    return found
