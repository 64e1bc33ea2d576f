"""Signs of life towards the control process, and what they carry: which workers wait for which others."""

import asyncio
import time

from racimo.agent.answers import send_reply
from racimo.agent.entry import Entry
from racimo.agent.protocol import Beat, Wait
from racimo.agent.pulse import Pulse
from racimo.agent.workers import Workers

WAIT_COUNTS_AFTER_S = 0.2
"""Waits shorter than this are a step's ordinary ones and are not told."""
LOOK_AGAIN_S = 0.05
"""How close together two beats may come."""


class Waits:
    """Who of this node's workers waits for whom. `changed` beats when that became different (with a small delay), and
    when the agent has got a worker to start."""

    def __init__(self, workers: Workers) -> None:
        self.changed = Pulse()
        self._workers = workers
        self._told: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
        self._look: asyncio.TimerHandle | None = None

    def now(self) -> tuple[Wait, ...]:
        """Those that have lasted for a moment."""
        now_s = time.monotonic()
        waits = tuple(_wait(entry, now_s) for entry in self._workers.live if _counts(entry, now_s))
        self._told = _gist(waits)
        return waits

    def note(self, entry: Entry) -> None:
        """A worker said where it is."""
        assert entry.progress is not None
        waiting = bool(entry.progress.waits_for or entry.progress.unreachable)
        if self._look is None and (waiting or self._told):
            delay_s = WAIT_COUNTS_AFTER_S if waiting else LOOK_AGAIN_S
            self._look = asyncio.get_running_loop().call_later(delay_s, self._look_again)

    def close(self) -> None:
        if self._look is not None:
            self._look.cancel()

    def _look_again(self) -> None:
        self._look = None
        now_s = time.monotonic()
        waits = tuple(_wait(entry, now_s) for entry in self._workers.live if _counts(entry, now_s))
        if _gist(waits) != self._told:
            self.changed.beat()


def _counts(entry: Entry, now_s: float) -> bool:
    progress = entry.progress
    waits = progress is not None and bool(progress.waits_for or progress.unreachable)
    return waits and now_s - entry.progress_at_s >= WAIT_COUNTS_AFTER_S * 0.9  # a timer may come a little early


def _wait(entry: Entry, now_s: float) -> Wait:
    assert entry.progress is not None
    return Wait(
        worker=entry.name,
        waits_for=entry.progress.waits_for,
        for_s=now_s - entry.progress_at_s,
        unreachable=entry.progress.unreachable,
    )


def _gist(waits: tuple[Wait, ...]) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]:
    return tuple((wait.worker, wait.waits_for, wait.unreachable) for wait in waits)


async def beat_for_ever(
    writer: asyncio.StreamWriter, workers: Workers, waits: Waits, *, busy_s: float, idle_s: float
) -> None:
    """Beats every `busy_s` while there are live workers, every `idle_s` otherwise, and at once at `waits.changed`."""
    number = 0
    while True:
        interval_s = busy_s if workers.live else idle_s
        number += 1
        send_reply(writer, 0, Beat(number=number, waits=waits.now(), next_s=interval_s))
        if await waits.changed.wait(interval_s):
            await asyncio.sleep(LOOK_AGAIN_S)
