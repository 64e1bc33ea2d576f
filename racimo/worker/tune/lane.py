"""The worker of a tune run: calls the user's function for one trial after the other, as long as it is given slices."""

import gc
import os
import select
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from racimo.agent.launch import Launch
from racimo.agent.protocol import Progress, Ready, Report, SliceDone, SliceOrder, WorkerContext
from racimo.spec.study import MAX_PARALLEL
from racimo.state.nouns import Failure
from racimo.worker.context import WorkerLeaving
from racimo.worker.link import AgentLink, NoLink, Told
from racimo.worker.train import run as current
from racimo.worker.tune.trial import Trial, TrialLeft
from racimo.worker.user_errors import failure_from

LATE_METRIC_CODE = 70
"""Exit code of a worker whose trial told nothing for too long: its function cannot be left otherwise."""


def serve(function: Callable[[dict[str, Any]], Any], launch: Launch, context: WorkerContext) -> None:
    """Runs slices until asked to leave; then raises `WorkerLeaving`."""
    lane = _Lane(function, launch, context)
    while (order := lane.next_order()) is not None:
        lane.run(order)
    lane.leave()


class _Lane:
    def __init__(self, function: Callable[[dict[str, Any]], Any], launch: Launch, context: WorkerContext) -> None:
        self._function, self._launch, self._context = function, launch, context
        self._link = AgentLink(context)
        self._done = -1
        """Number of the last slice that was run."""
        self._trial: Trial | None = None
        self._watchdog: threading.Timer | None = None
        self._link.ready(Ready(address="", micro_shards=MAX_PARALLEL, numerics=""))

    @property
    def asked_to_leave(self) -> bool:
        return self._link.pause_requested or self._link.leave_requested

    def next_order(self) -> SliceOrder | None:
        """Waits for a slice that was not run; None once this worker is to leave."""
        while True:
            self._link.clear_wake()
            given = self._link.slice
            if given is not None and given.order.grant.number > self._done:
                return given.order
            if self.asked_to_leave:
                return None
            select.select([self._link.wake_fd], [], [])

    def leave(self) -> None:
        self._link.close()
        raise WorkerLeaving("paused" if self._link.pause_requested else "released")

    def run(self, order: SliceOrder) -> None:
        """One trial, until its function returns or it is left; perhaps several slices of it."""
        self._done = order.grant.number
        folder = Path(self._context.output_dir) / "trials" / str(order.grant.trial)
        trial = Trial(order, Path(self._context.directory), self._say, self._following, lambda: self.asked_to_leave)
        self._trial = trial
        print(f"racimo: trial {trial.number}: {order.values}", file=sys.stderr)
        self._watch(order)
        link = TrialLink(self._link, trial.number, self)
        run = current.begin_trial(self._context, link, trial, folder)
        try:
            trial.finish(self._function({**self._launch.config, **order.values}))
        except TrialLeft:
            pass
        except WorkerLeaving:
            trial.leave()
        except BaseException as error:  # noqa: BLE001 - whatever user code raises ends its trial, and nothing else
            failure = failure_from(error, self._launch.cwd, self._launch.rank, self._launch.worker)
            print(failure.traceback, end="", file=sys.stderr)
            trial.fail(failure)
        finally:
            self._unwatch()
            run.end_trial()
            link.close()
            gc.collect()  # a model that hangs in a cycle would keep its memory beside the next trial's

    def _say(self, message: Report | SliceDone) -> None:
        if isinstance(message, Report):
            self._rewatch()
        self._link.tell(message)

    def _following(self) -> SliceOrder | None:
        """The next slice, if it is of the trial at hand."""
        assert self._trial is not None
        order = self.next_order()
        if order is None or order.grant.trial != self._trial.number:
            return None
        self._done = order.grant.number
        return order

    # A metric that never comes

    def _watch(self, order: SliceOrder) -> None:
        self._within_s = order.metric_within_s
        self._rewatch()

    def _rewatch(self) -> None:
        self._unwatch()
        if self._within_s:
            self._watchdog = threading.Timer(self._within_s, self._too_late)
            self._watchdog.daemon = True
            self._watchdog.start()

    def _unwatch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _too_late(self) -> None:
        """In the timer's thread: the function may be anywhere, so the process ends with it."""
        trial = self._trial
        if trial is None or trial.over:
            return
        message = f"trial {trial.number} reported nothing for {self._within_s:g} s"
        trial.fail(Failure(code="metric-late", message=message, hint="raise study.metric_within, or report more often"))
        print(f"racimo: {message}", file=sys.stderr, flush=True)
        self._link.close()
        os._exit(LATE_METRIC_CODE)


class TrialLink(NoLink):
    """What `run.steps` sees of the world in a trial: it trains alone, and leaves when its worker is to leave."""

    def __init__(self, link: AgentLink, trial: int, lane: _Lane) -> None:
        super().__init__(current.alone())
        self._link, self._trial, self._lane = link, trial, lane

    @property
    def pause_requested(self) -> bool:
        return self._lane.asked_to_leave

    @pause_requested.setter
    def pause_requested(self, value: bool) -> None:
        """Set by the base class only, to what it is."""

    def progress(self, message: Progress) -> None:
        self._link.progress(message)

    def tell(self, message: Told) -> None:
        self._link.tell(message)
