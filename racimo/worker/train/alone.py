"""What a run outside a cluster says of itself: nobody else shows its progress."""

import time
from typing import TextIO

from racimo.spec.quantity import format_duration

TERMINAL_EVERY_S = 1.0
LOG_EVERY_S = 10.0


class ProgressLine:
    """A line of progress on standard error now and then, and one at the last step."""

    def __init__(self, until: int, stream: TextIO, now_s: float | None = None) -> None:
        self._until = until
        self._stream = stream
        self._every_s = TERMINAL_EVERY_S if stream.isatty() else LOG_EVERY_S
        self._said_at_s = time.monotonic() if now_s is None else now_s

    def committed(self, step: int, loss: float, step_s: float | None, now_s: float) -> None:
        """Tells of a step; `step_s` is what one takes of late, None while that is not known."""
        if step < self._until and now_s - self._said_at_s < self._every_s:
            return
        self._said_at_s = now_s
        words = [f"step {step}/{self._until}", f"loss {loss:.4g}"]
        if step < self._until and step_s is not None:
            words.append(f"{format_duration((self._until - step) * step_s)} left")
        print(f"racimo: {', '.join(words)}", file=self._stream, flush=True)
