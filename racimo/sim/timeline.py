"""Virtual time: what happens next, in order, without waiting for it."""

import heapq
from collections.abc import Callable

START_S = 1_000.0
WALL_START_S = 1_700_000_000.0


class Timer:
    """Something that will happen unless cancelled."""

    def __init__(self, due_s: float, action: Callable[[], None]) -> None:
        self.due_s = due_s
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


class Timeline:
    """The clock of the simulated world; also the `Clock` of its control process."""

    def __init__(self) -> None:
        self._now_s = START_S
        self._heap: list[tuple[float, int, Timer]] = []
        self._number = 0

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return WALL_START_S + self._now_s

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        timer = Timer(self._now_s + max(0.0, delay_s), action)
        self._number += 1
        heapq.heappush(self._heap, (timer.due_s, self._number, timer))
        return timer

    def step(self) -> bool:
        """Lets the next thing happen; False if there is none."""
        while self._heap:
            due_s, _, timer = heapq.heappop(self._heap)
            if timer.action is not None:
                self._now_s = due_s
                action, timer.action = timer.action, None
                action()
                return True
        return False
