"""The trials of a tune run as a client holds them, and what people ask of them: who leads, the front, the way there."""

import heapq
import math
from collections.abc import Iterable, Iterator

import msgspec

from racimo.agent.protocol import Report
from racimo.control.views import StudyView, TrialView
from racimo.spec.expression import Expression
from racimo.spec.study import Objective, StudySpec
from racimo.state.events import Record, SliceEnded, SliceGranted

WORSE = frozenset({"diverged", "failed"})
"""Statuses whose values do not count, however good they look."""
MAX_FRONT = 2_000
"""Trials among which a Pareto front is looked for, the best by the first metric."""

Step = tuple[int, float | None, bool, float]
"""(trial, value, whether it may be the best, device-seconds since the step before)."""


class Point(msgspec.Struct, frozen=True):
    """One value of the first metric on the way: after `trials` begun and `device_s` device-seconds, the best so far
    was `best`."""

    trial: int
    value: float
    best: float
    device_s: float


class TrialTable:
    """Filled by `take`, answer by answer; the newest state of each trial counts."""

    def __init__(self, terms: StudySpec) -> None:
        self.terms = terms
        self.space = terms.parsed_space
        self.objectives: tuple[Objective, ...] = terms.objectives
        self.trials: dict[int, TrialView] = {}
        self.newest = StudyView(seq=-1)
        """The newest answer, without most of its trials."""
        self._limits = [Expression(limit, None) for limit in terms.limits]
        self._num_heard: dict[int, int] = {}
        """By trial, its reports of the first metric."""

    def take(self, view: StudyView) -> list[TrialView]:
        """Takes an answer; those of its trials whose status is another than before, or that are new."""
        changed = []
        for trial in view.trials:
            before = self.trials.get(trial.number)
            if before is None or before.status != trial.status:
                changed.append(trial)
            self.trials[trial.number] = trial
        self.newest = msgspec.structs.replace(view, trials=())
        return changed

    def hear(self, reports: Iterable[Report]) -> None:
        """What trials reported, each report once: those that run are then where they are now, not where their slice
        began."""
        metric = self.objectives[0].metric
        for report in reports:
            if report.trial is None:
                continue
            if metric in report.values:
                self._num_heard[report.trial] = self._num_heard.get(report.trial, 0) + 1
            trial = self.trials.get(report.trial)
            if trial is not None and trial.status == "running":
                rounds = max(trial.rounds, self._num_heard.get(report.trial, 0))
                metrics = {**trial.metrics, **report.values}
                self.trials[trial.number] = msgspec.structs.replace(trial, rounds=rounds, metrics=metrics)

    def under(self, terms: StudySpec) -> "TrialTable":
        """The same trials, looked at under other terms."""
        other = TrialTable(terms)
        other.trials, other.newest, other._num_heard = self.trials, self.newest, self._num_heard
        return other

    def value(self, trial: TrialView, objective: int = 0) -> float | None:
        """Its newest value of a metric, as reported; None if it told none that is finite."""
        value = trial.metrics.get(self.objectives[objective].metric)
        return value if value is not None and math.isfinite(value) else None

    def signed(self, trial: TrialView, objective: int = 0) -> float:
        """The same, less being better; infinity without one."""
        value = self.value(trial, objective)
        return math.inf if value is None else self.objectives[objective].signed(value)

    def counts(self, trial: TrialView) -> bool:
        """Whether it may be the best: it told the first metric, did not fail, and meets the limits."""
        if trial.status in WORSE or self.value(trial) is None:
            return False
        return all(limit.names <= trial.metrics.keys() and limit.holds(trial.metrics) for limit in self._limits)

    def top(self, count: int) -> list[TrialView]:
        """The best by the first metric, of equals the earlier."""
        able = (trial for trial in self.trials.values() if self.counts(trial))
        return heapq.nsmallest(count, able, key=lambda trial: (self.signed(trial), trial.number))

    @property
    def best(self) -> TrialView | None:
        """As the cluster says."""
        return self.trials.get(self.newest.best) if self.newest.best is not None else None

    @property
    def running(self) -> list[TrialView]:
        return sorted((t for t in self.trials.values() if t.status == "running"), key=lambda trial: trial.number)

    @property
    def front(self) -> list[TrialView]:
        """Trials than which none is better in one metric and no worse in the others, by the first metric."""
        found: list[tuple[tuple[float, ...], TrialView]] = []
        for trial in self.top(MAX_FRONT):
            place = tuple(self.signed(trial, index) for index in range(len(self.objectives)))
            if all(math.isfinite(part) for part in place) and not any(_beats(other, place) for other, _ in found):
                found = [(other, one) for other, one in found if not _beats(place, other)]
                found.append((place, trial))
        return [trial for _, trial in found]

    @property
    def history(self) -> list[Point]:
        """The newest value of each trial, in the order in which they were begun; `best` counts those that may."""
        return _way(
            ((t.number, self.value(t), self.counts(t), t.device_s) for _, t in sorted(self.trials.items())),
            self.objectives[0],
        )

    def way(self, records: Iterable[Record], devices_per_worker: int = 1) -> list[Point]:
        """From the run's events: each slice that ended, as it ended."""
        return _way(self._slices(records, devices_per_worker), self.objectives[0])

    def _slices(self, records: Iterable[Record], devices_per_worker: int) -> Iterator[Step]:
        granted: dict[int, int] = {}
        for record in records:
            match record.event:
                case SliceGranted(grant=grant):
                    granted[grant.number] = grant.trial
                case SliceEnded(number=number, result=result) if number in granted:
                    trial = granted.pop(number)
                    counts = trial in self.trials and self.counts(self.trials[trial])
                    value = result.metrics.get(self.objectives[0].metric)
                    yield trial, value, counts, result.worked_s * devices_per_worker
                case _:
                    pass


def _way(steps: Iterable[Step], objective: Objective) -> list[Point]:
    points: list[Point] = []
    best, device_s = math.inf, 0.0
    for trial, value, counts, spent_s in steps:
        device_s += spent_s
        if value is None or not math.isfinite(value):
            continue
        if counts:
            best = min(best, objective.signed(value))
        if math.isfinite(best):
            points.append(Point(trial, value, best if objective.minimize else -best, device_s))
    return points


def _beats(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))
