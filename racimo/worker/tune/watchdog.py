"""Limits on a trial's function that hold wherever its code is: a thread that ends the process when one is passed."""

import threading
import time
from collections.abc import Callable

Act = Callable[[], None]


class Watchdog:
    """One limit at a time: `act` is called, in the watchdog's own thread, once it is passed. Putting it off is cheap.

    `now_s`: seconds of a clock that never goes back."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._changed = threading.Condition()
        self._due_s: float | None = None
        self._act: Act | None = None
        self._thread: threading.Thread | None = None

    def watch(self, within_s: float, act: Act) -> None:
        """Takes the place of an earlier limit."""
        with self._changed:
            earlier = self._due_s
            self._due_s, self._act = self._now_s() + within_s, act
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="racimo-watchdog", daemon=True)
                self._thread.start()
            elif earlier is None or self._due_s < earlier:
                self._changed.notify()

    def put_off(self, within_s: float) -> None:
        """The same limit, counted from now. The thread sleeps on, and looks again when it would have been passed."""
        if self._due_s is not None:
            self._due_s = self._now_s() + within_s

    def rest(self) -> None:
        """No limit."""
        self._due_s = None

    def _run(self) -> None:
        with self._changed:
            while True:
                due_s = self._due_s
                left_s = None if due_s is None else due_s - self._now_s()
                if left_s is None or left_s > 0:
                    self._changed.wait(left_s)
                    continue
                act, self._due_s = self._act, None
                assert act is not None
                act()
