"""A process for each trial (`study.fresh`): the worker forks one, waits until it has ended, and forks the next.

Nothing a trial does to its process reaches another one. The user's file is imported anew each time. The worker itself
runs no user code, so it stays fit to fork; it ends as its child did, unless that only came to the end of its trial.
"""

import os
import signal
from collections.abc import Callable
from typing import NoReturn

from racimo.agent.processes import kill_children_except, set_parent_death_signal
from racimo.worker.context import WorkerLeaving
from racimo.worker.tune.endings import DEVICE_BROKEN_CODE, LATE_METRIC_CODE, NOT_LEFT_CODE

NEXT_CODE, PAUSED_CODE, RELEASED_CODE = 80, 81, 82
_TRIAL_IS_OVER = frozenset({NEXT_CODE, LATE_METRIC_CODE, NOT_LEFT_CODE, DEVICE_BROKEN_CODE})


def serve_one_by_one(serve_one: Callable[[], int]) -> NoReturn:
    """`serve_one` runs one trial in a new process and returns its exit code. Raises `WorkerLeaving`, or `SystemExit`
    with the code of a process that ended otherwise; dies of the signal that one of them died of."""
    while True:
        status = _run(serve_one)
        kill_children_except(frozenset())
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        code = os.WEXITSTATUS(status)
        if code == PAUSED_CODE:
            raise WorkerLeaving("paused")
        if code == RELEASED_CODE:
            raise WorkerLeaving("released")
        if code not in _TRIAL_IS_OVER:
            raise SystemExit(code)


def code_of(outcome: str) -> int:
    """How a trial's process tells its worker that this was to leave, `paused` or `released`."""
    return PAUSED_CODE if outcome == "paused" else RELEASED_CODE


def _run(serve_one: Callable[[], int]) -> int:
    """The wait status of a forked process that ran `serve_one`."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    code = 1
    try:
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() == parent:
            code = serve_one()
    finally:
        os._exit(code)
