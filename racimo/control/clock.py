"""The cluster's own clock: it never goes back, and goes on across restarts of the control process.

Cluster time is the wall clock when the process started, or the journal's newest time if that is later (somebody may
have set the wall clock back), plus monotonic time since.
"""

import time
from collections.abc import Callable


class ClusterClock:
    """Seconds on the cluster's clock (`now_s`) and on the wall (`wall_s`, for people only)."""

    def __init__(
        self,
        last_at_s: float = 0.0,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._start_s = max(wall(), last_at_s)
        self._monotonic_start_s = monotonic()

    def now_s(self) -> float:
        return self._start_s + self._monotonic() - self._monotonic_start_s

    def wall_s(self) -> float:
        return self._wall()
