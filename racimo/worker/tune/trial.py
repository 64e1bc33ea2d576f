"""One trial as its worker sees it: what it has reported, what its slice allows, and how the slice ends."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from racimo.agent.protocol import Report, SliceDone, SliceOrder
from racimo.agent.slices import RESULTS_FILE
from racimo.state.nouns import Failure
from racimo.state.trials import Curve, Result, SliceOutcome
from racimo.worker.tune.numbers import numbers
from racimo.worker.tune.thin import thinned


class TrialLeft(SystemExit):
    """Ends the user's function because its slice is over and the worker is to do something else.

    A `SystemExit`, so that `except Exception` in user code lets it pass."""


class Told(msgspec.Struct):
    """What a trial has reported, all its slices together; it is saved with the trial's state."""

    rounds: int = 0
    step: int = 0
    metrics: dict[str, float] = {}
    curve: list[tuple[int, float]] = []


class Trial:
    """Keeps count of the reports of one trial, and ends its slice when it has its rounds.

    `say` sends a message to the agent; `decide` is called when a slice has ended, and returns the next slice of the
    same trial, or None if the worker is to leave it. `save` makes what the trial has saved hold all that it has told,
    and returns whether it could."""

    def __init__(
        self,
        order: SliceOrder,
        directory: Path,
        say: Callable[[Report | SliceDone], None],
        decide: Callable[[], SliceOrder | None],
        asked_to_leave: Callable[[], bool],
    ) -> None:
        self.number = order.grant.trial
        self.told = Told()
        self.saved = 0
        """Rounds that the saved state holds."""
        self.save: Callable[[], bool] = lambda: False
        self.over = False
        self._order = order
        self._directory = directory
        self._say, self._decide, self._asked_to_leave = say, decide, asked_to_leave
        self._begun_s = time.monotonic()
        self._told_upto = order.rounds
        """Rounds of which earlier slices told the values."""

    def take_up(self, told: dict[str, Any] | None) -> None:
        """What was saved with the state: the trial goes on from there. None: it begins anew."""
        self.told = msgspec.convert(told, Told) if told is not None else Told()
        self.saved = self.told.rounds

    def report(self, step: int | None, values: dict[str, float]) -> None:
        """Counts what is new, and ends the slice if that is due. Raises `TrialLeft` where the trial is to be left."""
        told = self.told
        step = told.step + 1 if step is None else step
        self._say(Report(step=step, values=values, trial=self.number))
        if step <= told.step:
            return  # told before the state was saved that the trial went on from
        first, *others = self._order.objectives
        told.metrics = {**told.metrics, **values}
        if first in values:
            told.rounds, told.step = told.rounds + 1, step
            told.curve = thinned(told.curve, (told.rounds, values[first]))
        if any(not math.isfinite(values[name]) for name in (first, *others) if name in values):
            self._end("diverged")
            raise TrialLeft(0)
        if first in values:
            self._after_round()

    def _after_round(self) -> None:
        until, prepaid_s = self._order.grant.until, self._order.grant.prepaid_s
        if until and self.told.rounds >= until:
            self._pass_on("reached")
        elif self._asked_to_leave():
            self._pass_on("halted")
        elif prepaid_s and time.monotonic() - self._begun_s >= prepaid_s:
            self._pass_on("expired")

    def _pass_on(self, outcome: SliceOutcome) -> None:
        """The slice is over; the trial goes on at once if its next slice is this worker's, too."""
        if self.save():
            self.saved = self.told.rounds
        self._end(outcome)
        following = self._decide()
        if following is None:
            raise TrialLeft(0)
        self._order, self.over, self._begun_s = following, False, time.monotonic()

    def leave(self) -> None:
        """The function was left between two rounds, because the worker is to leave and the state is saved."""
        self.saved = self.told.rounds
        self._end("halted")

    def finish(self, returned: Any) -> None:
        """The function has come to its end. What it returned counts as a report: a number as the (first) metric."""
        if returned is not None and not self.over:
            self._take_return(returned)
        if self.over:
            return
        first = self._order.objectives[0]
        if first in self.told.metrics:
            self._end("finished")
            return
        found = ", ".join(sorted(self.told.metrics)) or "nothing"
        message = f"trial {self.number} ended without reporting {first}; it reported {found}"
        self.fail(Failure(code="metric-missing", message=message, hint=f"run.report({first}=...), or return it"))

    def _take_return(self, returned: Any) -> None:
        if isinstance(returned, dict):
            values = numbers(returned)
        elif len(self._order.objectives) == 1:
            values = numbers({self._order.objectives[0]: returned})
        else:
            return
        try:
            self._order = msgspec.structs.replace(
                self._order, grant=msgspec.structs.replace(self._order.grant, until=0, prepaid_s=0.0)
            )
            self.report(None, values)
        except TrialLeft:
            pass  # it diverged at the very end

    def fail(self, failure: Failure) -> None:
        if not self.over:
            self._end("failed", failure)

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
        with open(self._directory / RESULTS_FILE, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(msgspec.json.encode(done) + b"\n")
        self.over = True
        self._say(done)

    def _new_points(self) -> Curve:
        points = [point for point in self.told.curve if point[0] > self._told_upto and math.isfinite(point[1])]
        self._told_upto = self.told.rounds
        return tuple(points)

    # What is saved with the state (`Stateful`)

    def state_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self.told)  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.take_up(state)
