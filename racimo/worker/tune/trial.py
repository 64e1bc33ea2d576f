"""One trial as its worker sees it: what it has reported, what its slice allows, and how the slice ends."""

import math
import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from racimo.agent.protocol import Report, SliceDone, SliceOrder
from racimo.agent.slices import RESULTS_FILE
from racimo.spec.errors import RacimoError
from racimo.state.nouns import Failure
from racimo.state.trials import Curve, Result, SliceOutcome
from racimo.worker.train import faults
from racimo.worker.train.telemetry import say as say_to_people
from racimo.worker.tune.numbers import numbers
from racimo.worker.tune.thin import thinned

MAX_METRICS = 1_000
"""Names that one trial may report under."""


class TrialLeft(SystemExit):
    """Ends the user's function because its slice is over and the worker is to do something else.

    A `SystemExit`, so that `except Exception` in user code lets it pass."""


class Told(msgspec.Struct):
    """What a trial has reported, all its slices together; it is saved with the trial's state."""

    rounds: int = 0
    step: int = 0
    """The newest that was reported for."""
    metrics: dict[str, float] = {}
    curve: list[tuple[int, float]] = []
    seen: dict[str, int] = {}
    """By name, the step of its newest value: the first of each step counts."""


class Trial:
    """Keeps count of the reports of one trial, and ends its slice when it has its rounds. Any thread may report.

    `say` sends a message to the agent; `decide` is called when a slice has ended, and returns the next slice of the
    same trial, or None if it is to be left; `left` is called then, before `TrialLeft` is raised. A loop that can save
    sets `keep`, and `looping` while it runs: its slices end at `boundary`, between two rounds of the loop, where the
    state is whole; else they end in `report`."""

    def __init__(
        self,
        order: SliceOrder,
        directory: Path,
        say: Callable[[Report | SliceDone], None],
        decide: Callable[[], SliceOrder | None],
        asked_to_leave: Callable[[], bool],
        left: Callable[[], None] = lambda: None,
    ) -> None:
        self.number = order.grant.trial
        self.told = Told()
        self.saved = 0
        """Rounds that the saved state holds."""
        self.keep: Callable[[], None] | None = None
        self.looping = False
        self.over = False
        """Its slice has ended, and no other one has begun."""
        self._order = order
        self._directory = directory
        self._say, self._decide, self._asked_to_leave, self._left = say, decide, asked_to_leave, left
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._begun_s = self._round_began_s = time.monotonic()
        self._told_upto = order.rounds
        """Rounds of which earlier slices told the values."""

    @property
    def told_values(self) -> dict[str, Any]:
        """What the trial has reported, to be saved beside the state of its loop."""
        with self._lock:
            return msgspec.to_builtins(self.told)  # type: ignore[no-any-return]

    def take_up(self, told: dict[str, Any] | None) -> None:
        """What was saved with the state: the trial goes on from there. None: it begins anew."""
        with self._lock:
            self.told = msgspec.convert(told, Told) if told is not None else Told()
            self.saved = self.told.rounds

    def note_saved(self) -> None:
        """The saved state now holds all that was told."""
        self.saved = self.told.rounds

    def report(self, step: int | None, values: dict[str, float]) -> None:
        """Counts what is new, and ends the slice if that is due. Raises `TrialLeft` where the trial is to be left, and
        whenever it was: a report under another trial is impossible (syne-tune#214)."""
        with self._lock:
            self._raise_if_left()
            self._refuse_forks()
            _refuse_too_many(self.told.metrics.keys() | values.keys())
            step = self._next_step(values) if step is None else step
            self._say(Report(step=step, values=values, trial=self.number))
            faults.point("reported", self.told.rounds)
            fresh = self._count(step, values)
            if self._diverges(fresh):
                self._end("diverged")
                self._leave()
            if self._order.objectives[0] in fresh and not self.looping:
                self.boundary()

    def boundary(self) -> None:
        """Between two rounds of the function's own: the slice ends here if it is to. Raises as `report` does."""
        with self._lock:
            self._raise_if_left()
            until, prepaid_s = self._order.grant.until, self._order.grant.prepaid_s
            if until and self.told.rounds >= until:
                self._pass_on("reached")
            elif self._asked_to_leave():
                self._pass_on("halted")
            elif prepaid_s and self._next_round_ends_late(prepaid_s):
                self._pass_on("expired")
            self._round_began_s = time.monotonic()

    def _next_round_ends_late(self, prepaid_s: float) -> bool:
        """Whether another round as long as the last one would end after what is paid for."""
        now_s = time.monotonic()
        return now_s - self._begun_s + (now_s - self._round_began_s) > prepaid_s

    def finish(self, returned: Any) -> None:
        """The function has come to its end. What it returned is its newest value: a number the (first) metric's, a dict
        by name. It counts as a round only where that metric was never reported."""
        with self._lock:
            if self.over:
                return
            first = self._order.objectives[0]
            values = self._values_of(returned)
            if first in self.told.metrics:
                self.told.metrics = {**self.told.metrics, **values}
            elif values:
                step = self._next_step(values)
                self._say(Report(step=step, values=values, trial=self.number))
                self._count(step, values)
            if self._diverges(values):
                self._end("diverged")
            elif first in self.told.metrics:
                self._end("finished")
            else:
                found = ", ".join(sorted(self.told.metrics)) or "nothing"
                message = f"trial {self.number} ended without reporting {first}; it reported {found}"
                hint = f"run.report({first}=...), or return it"
                self.fail(Failure(code="metric-missing", message=message, hint=hint))

    def fail(self, failure: Failure) -> None:
        """Nothing if its slice is over: what the function does then counts no more."""
        with self._lock:
            if not self.over:
                self._end("failed", _in_utf8(failure))

    # Within

    def _raise_if_left(self) -> None:
        if self.over:
            raise TrialLeft(0)

    def _refuse_forks(self) -> None:
        if os.getpid() != self._process:
            message = f"trial {self.number} reported from a process that it forked, which nobody hears"
            raise RacimoError("steps-misused", message, "report in the process that the function was called in")

    def _next_step(self, values: dict[str, float]) -> int:
        """Where none is given: the present one, or the next if it has a value of these already."""
        present = max(self.told.step, 1)
        return present + 1 if any(self.told.seen.get(name) == present for name in values) else present

    def _count(self, step: int, values: dict[str, float]) -> dict[str, float]:
        """Takes what is new of a report, and returns it."""
        told, first = self.told, self._order.objectives[0]
        fresh = {name: value for name, value in values.items() if told.seen.get(name) != step}
        told.metrics = {**told.metrics, **fresh}
        told.seen = {**told.seen, **dict.fromkeys(fresh, step)}
        told.step = max(told.step, step)
        if first in fresh:
            told.rounds += 1
            told.curve = thinned(told.curve, (told.rounds, fresh[first]))
        return fresh

    def _diverges(self, values: dict[str, float]) -> bool:
        return any(not math.isfinite(values[name]) for name in self._order.objectives if name in values)

    def _pass_on(self, outcome: SliceOutcome) -> None:
        """The slice is over; the trial goes on at once if its next slice is this worker's, too."""
        if self.keep is not None:
            try:
                self.keep()
                self.note_saved()
            except OSError as error:
                say_to_people(f"trial {self.number} could not be saved after {self.told.rounds} rounds: {error}")
        faults.point("kept", self.told.rounds)
        self._end(outcome)
        following = self._decide()
        if following is None:
            self._leave()
        else:
            self._order, self.over, self._begun_s = following, False, time.monotonic()

    def _leave(self) -> None:
        self._left()
        raise TrialLeft(0)

    def _values_of(self, returned: Any) -> dict[str, float]:
        if returned is None:
            return {}
        if isinstance(returned, dict):
            return numbers(returned)
        objectives = self._order.objectives
        if isinstance(returned, tuple | list) and len(returned) == len(objectives) > 1:
            return numbers(dict(zip(objectives, returned, strict=True)))
        return numbers({objectives[0]: returned}) if len(objectives) == 1 else {}

    def _end(self, outcome: SliceOutcome, failure: Failure | None = None) -> None:
        told = self.told
        result = Result(
            outcome=outcome,
            rounds=told.rounds,
            step=told.step,
            metrics={name: value for name, value in told.metrics.items() if math.isfinite(value)},
            curve=self._new_points(),
            saved=self.saved,
            worked_s=time.monotonic() - self._begun_s,
            failure=failure,
        )
        done = SliceDone(number=self._order.grant.number, result=result)
        write_result(self._directory, done)
        self.over = True
        faults.point("written", told.rounds)
        self._say(done)

    def _new_points(self) -> Curve:
        points = [point for point in self.told.curve if point[0] > self._told_upto and math.isfinite(point[1])]
        self._told_upto = self.told.rounds
        return tuple(points)


def _refuse_too_many(names: Collection[str]) -> None:
    if len(names) > MAX_METRICS:
        raise RacimoError(
            "metric-invalid",
            f"this trial has reported {MAX_METRICS} different metrics, and {max(names)} would be one more",
            "report the same names with other steps",
        )


def write_result(directory: Path, done: SliceDone) -> None:
    """Into the worker's own file, from which its agent takes it should the worker die before it is heard."""
    with open(directory / RESULTS_FILE, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(msgspec.json.encode(done) + b"\n")


def _in_utf8(failure: Failure) -> Failure:
    """What UTF-8 cannot hold written as escapes: a file name's odd byte, or half a surrogate pair."""
    texts = {
        name: value.encode(errors="backslashreplace").decode()
        for name, value in msgspec.structs.asdict(failure).items()
        if isinstance(value, str)
    }
    return msgspec.structs.replace(failure, **texts)
