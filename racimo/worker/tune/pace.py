"""How often a state is saved: each time, unless that took too large a part of the time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_OF_TIME = 0.05
"""Saving may take this part of the time; where it would take more, not every step or round is saved."""


class Pace:
    """Measures what saving costs. `now_s`: a clock in seconds that never goes back."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._save_s = 0.0
        self._saved_at_s = now_s()

    @property
    def due(self) -> bool:
        """Whether another save now keeps within its part of the time."""
        return self._now_s() - self._saved_at_s >= self._save_s / MOST_OF_TIME

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around each save."""
        begun_s = self._now_s()
        yield
        self._saved_at_s = self._now_s()
        self._save_s = self._saved_at_s - begun_s
