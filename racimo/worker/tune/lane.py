"""The worker of a tune run: calls the user's function for one trial after the other, as long as it is given slices."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from racimo.agent.kept import trial_folder
from racimo.agent.launch import Launch
from racimo.agent.protocol import Progress, Ready, Report, SliceDone, SliceOrder, WorkerContext
from racimo.agent.slices import newest_result, note_begun
from racimo.spec.study import MAX_PARALLEL
from racimo.state.nouns import Failure
from racimo.worker.context import WorkerLeaving
from racimo.worker.link import AgentLink, NoLink, Told
from racimo.worker.train import run as current
from racimo.worker.tune.endings import DEVICE_BROKEN_CODE, LATE_METRIC_CODE, NOT_LEFT_CODE
from racimo.worker.tune.surroundings import Surroundings, device_is_broken, limit_device_memory
from racimo.worker.tune.trial import Trial, TrialLeft
from racimo.worker.tune.watchdog import Watchdog
from racimo.worker.user_errors import failure_from

LEAVE_SIGNAL = signal.SIGRTMIN + 9
"""Brings `TrialLeft` into the main thread, where another one's report ended the slice."""

Function = Callable[[dict[str, Any]], Any]


def serve(function: Function, launch: Launch, context: WorkerContext, only_one_trial: bool = False) -> None:
    """Runs slices until asked to leave; then raises `WorkerLeaving`. With `only_one_trial` it returns after that."""
    current.serve_trials()
    limit_device_memory(launch.shares)
    lane = Lane(function, launch, context)
    while (order := lane.next_order()) is not None:
        lane.run(order)
        if only_one_trial:
            lane.close()
            return
    lane.close()
    raise WorkerLeaving("paused" if lane.pause_requested else "released")


class Lane:
    """One worker's way from slice to slice."""

    def __init__(self, function: Function, launch: Launch, context: WorkerContext) -> None:
        self._function, self._launch, self._context = function, launch, context
        self._directory = Path(context.directory)
        self._watchdog = Watchdog()
        self._within_s = self._alive_s = self._leave_within_s = 0.0
        self._trial: Trial | None = None
        self._inside = False
        """The main thread is in the user's function."""
        self._phase_number = 0
        self._unsaid = threading.Lock()
        signal.signal(LEAVE_SIGNAL, self._on_leave_signal)
        self._link = AgentLink(context)
        said = newest_result(self._directory)
        self._done = said.number if said is not None else -1
        """Number of the last slice that was begun."""
        if said is not None:  # by the process before this one, perhaps to nobody
            self._link.tell(said)
        self._link.ready(Ready(address="", micro_shards=MAX_PARALLEL, numerics=""))
        self._surroundings = Surroundings()

    @property
    def pause_requested(self) -> bool:
        return self._link.pause_requested

    @property
    def _asked_to_leave(self) -> bool:
        return self._link.pause_requested or self._link.leave_requested

    def next_order(self) -> SliceOrder | None:
        """Waits for a slice that was not run; None once this worker is to leave."""
        while True:
            self._link.clear_wake()
            order = self._pending()
            if order is not None or self._asked_to_leave:
                return order
            select.select([self._link.wake_fd], [], [])

    def _pending(self) -> SliceOrder | None:
        given = self._link.slice
        return given.order if given is not None and given.order.grant.number > self._done else None

    def close(self) -> None:
        """Sends what is still to be sent."""
        self._link.close()

    def run(self, order: SliceOrder) -> None:
        """One trial, until its function returns or it is left; perhaps several slices of it."""
        self._begin(order)
        asked = lambda: self._asked_to_leave  # noqa: E731
        self._trial = trial = Trial(order, self._directory, self._say, self._following, asked, self._on_left)
        print(f"racimo: trial {trial.number}: {order.values}", file=sys.stderr)
        self._within_s, self._leave_within_s = order.metric_within_s, order.leave_within_s
        self._expect_a_metric()
        link = TrialLink(self._link, self)
        folder = trial_folder(Path(self._context.output_dir), trial.number)
        run = current.begin_trial(self._context, link, trial, folder)
        try:
            self._call(trial, {**self._launch.config, **order.values})
        finally:
            self._watchdog.rest()
            run.end_trial()
            link.close()
            self._trial = None
        del run, link
        self._surroundings.put_back()
        if device_is_broken():
            self._end(DEVICE_BROKEN_CODE)

    def _call(self, trial: Trial, config: dict[str, Any]) -> None:
        """Whatever user code raises ends its trial, and nothing else."""
        try:
            self._inside = True
            returned = self._in_this_process(config)
            self._inside = False
            trial.finish(returned)
        except (TrialLeft, WorkerLeaving):
            pass
        except SystemExit as error:
            self._inside = False
            if not error.code:
                trial.finish(None)
            else:
                trial.fail(self._failure(error))
        except BaseException as error:  # noqa: BLE001
            self._inside = False
            failure = self._failure(error)
            print(failure.traceback, end="", file=sys.stderr)
            trial.fail(failure)
        finally:
            self._inside = False

    def _in_this_process(self, config: dict[str, Any]) -> Any:
        """What the function returns. A process that it forked ends with it: there is one worker."""
        here = os.getpid()
        try:
            return self._function(config)
        finally:
            if os.getpid() != here:
                sys.stdout.flush()
                os._exit(0)

    def _failure(self, error: BaseException) -> Failure:
        return failure_from(error, self._launch.cwd, self._launch.rank, self._launch.worker)

    def _say(self, message: Report | SliceDone) -> None:
        if isinstance(message, Report):
            self.note_alive()
        self._link.tell(message)

    def _following(self) -> SliceOrder | None:
        """The next slice, if it is of the trial at hand. The function waits meanwhile, and no limit is on it."""
        assert self._trial is not None
        self._watchdog.rest()
        self.tell_progress(Progress(worker=self._context.worker, phase="done"))
        order = self.next_order()
        if order is None or order.grant.trial != self._trial.number:
            return None
        self._begin(order)
        self._expect_a_metric()
        return order

    def _begin(self, order: SliceOrder) -> None:
        """Noted for the agent: what it gave to this process and was not begun when this ends goes back as it was."""
        self._done = order.grant.number
        note_begun(self._directory, self._done)

    # Leaving a function

    def _on_left(self) -> None:
        """The trial at hand is left, whichever thread found that out. Its function has a while to come to its end."""
        self._watchdog.watch(self._leave_within_s, self._not_left)
        if threading.current_thread() is not threading.main_thread():
            signal.pthread_kill(threading.main_thread().ident or 0, LEAVE_SIGNAL)

    def _on_leave_signal(self, number: int, frame: object) -> None:
        trial = self._trial
        if self._inside and trial is not None and trial.over:
            raise TrialLeft(0)

    def _not_left(self) -> None:
        trial = self._trial
        number = trial.number if trial is not None else -1
        print(
            f"racimo: the function of trial {number} goes on {self._leave_within_s:g} s after it was left (does it"
            " catch SystemExit?): its process ends",
            file=sys.stderr,
            flush=True,
        )
        self._end(NOT_LEFT_CODE)

    # A metric that never comes

    def _expect_a_metric(self) -> None:
        self._alive_s = time.monotonic()
        if self._within_s:
            self._watchdog.watch(self._within_s, self._too_late)

    def note_alive(self) -> None:
        """The trial has told something."""
        self._alive_s = time.monotonic()
        if self._within_s:
            self._watchdog.put_off(self._within_s)

    def _too_late(self) -> None:
        """In the watchdog's thread: the function may be anywhere, so the process ends with it. One that told something
        just now is not late (optuna#4862: a live trial was declared stale)."""
        trial = self._trial
        if trial is None or trial.over:
            return
        left_s = self._alive_s + self._within_s - time.monotonic()
        if left_s > 0:
            self._watchdog.watch(left_s, self._too_late)
            return
        message = f"trial {trial.number} reported nothing for {self._within_s:g} s"
        trial.fail(Failure(code="metric-late", message=message, hint="raise study.metric_within, or report more often"))
        print(f"racimo: {message}", file=sys.stderr, flush=True)
        self._end(LATE_METRIC_CODE)

    def _end(self, code: int) -> None:
        """Ends the process, whatever its threads do."""
        self._link.close()
        os._exit(code)

    # What is told of it

    def tell_progress(self, message: Progress) -> None:
        """Phases are counted through all trials of this process: each is another one than any before."""
        with self._unsaid:
            self._phase_number += 1
            number = self._phase_number = max(self._phase_number, message.phase_number)
        self._link.progress(msgspec.structs.replace(message, phase_number=number))


class TrialLink(NoLink):
    """What `run.steps` sees of the world in a trial: it trains alone, and its loop ends when its `Keeper` says so."""

    def __init__(self, link: AgentLink, lane: Lane) -> None:
        super().__init__(current.alone())
        self._link, self._lane = link, lane
        self._step = 0

    def progress(self, message: Progress) -> None:
        if message.step != self._step:
            self._step = message.step
            self._lane.note_alive()
        self._lane.tell_progress(message)

    def tell(self, message: Told) -> None:
        self._link.tell(message)
