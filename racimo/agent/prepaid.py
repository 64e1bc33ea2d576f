"""What is paid for each worker of a limited study: at its end the agent ends the worker, whoever is down elsewhere.

The end is kept in the worker's folder as a time of CLOCK_MONOTONIC, for the agent that comes after this one.
"""

import asyncio
import sys
import time
from collections.abc import Callable

from racimo.agent.entry import Entry
from racimo.agent.protocol import StopWorker
from racimo.agent.stopping import stop_worker
from racimo.agent.whole_file import write_whole
from racimo.state.nouns import Failure

PAID_FILE = "paid-until"
HARD_STOP_S = 1.0
"""So long before the end of what is paid the worker is killed: its end takes a moment."""


def abort(entry: Entry) -> None:
    """SIGKILL, or never started."""
    stop_worker(entry, StopWorker(worker=entry.name, how="abort"))


class Prepaid:
    """Timers of the workers whose life is prepaid. `host`: this node's name, for messages; `end` ends a worker."""

    def __init__(self, host: Callable[[], str], end: Callable[[Entry], None] = abort) -> None:
        self._host, self._end = host, end
        self._until_s: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def started(self, entry: Entry) -> None:
        """The lease of a worker begins."""
        if entry.order.paid_s:
            self._arm(entry, entry.accepted_s + entry.order.paid_s)

    def adopted(self, entry: Entry) -> None:
        """An earlier agent started it; what was last written down is what is paid."""
        if not entry.order.paid_s:
            return
        try:
            until_s = float((entry.directory / PAID_FILE).read_text())
        except (FileNotFoundError, ValueError):
            until_s = entry.accepted_s + entry.order.paid_s
        self._arm(entry, until_s)

    def extend(self, entry: Entry, paid_s: float) -> None:
        """More of its life is paid for; never less."""
        until_s = entry.accepted_s + paid_s
        if paid_s and until_s > self._until_s.get(entry.name, 0.0):
            self._arm(entry, until_s)
            try:
                write_whole(entry.directory / PAID_FILE, repr(until_s).encode())
            except OSError as error:
                # The next agent would know less than was paid, and end the worker early: nothing is spent by that.
                print(f"agent: cannot note what is paid for {entry.name}: {error}", file=sys.stderr)

    def ended(self, entry: Entry) -> None:
        self._until_s.pop(entry.name, None)
        timer = self._timers.pop(entry.name, None)
        if timer is not None:
            timer.cancel()

    def _arm(self, entry: Entry, until_s: float) -> None:
        self.ended(entry)
        self._until_s[entry.name] = until_s
        delay_s = max(0.0, until_s - HARD_STOP_S - time.monotonic())
        self._timers[entry.name] = asyncio.get_running_loop().call_later(delay_s, self._over, entry)

    def _over(self, entry: Entry) -> None:
        if not entry.live:
            return
        message = f"{entry.name} was ended on {self._host()}: no more of its time was paid for"
        entry.doom = entry.doom or Failure(code="prepaid-over", message=message, rank=entry.order.rank)
        self._end(entry)
