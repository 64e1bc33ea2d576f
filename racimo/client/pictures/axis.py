"""From values to pixels, with marks at round numbers."""

import math
from collections.abc import Sequence

from racimo.client.pictures.scene import FAINT, SOFT, Frame, Line, Mark, Words

NUM_TICKS = 5
LOG_FROM_RATIO = 100.0
"""Positive values that are so far apart are shown by their logarithm."""
PADDING = 0.04
"""Of the axis, left free at both ends."""


class Axis:
    """`start` and `end` are the pixels of `low` and `high`."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False) -> None:
        if high <= low:
            room = abs(low) * 0.1 or 1.0
            low, high = (low / 2, high * 2) if log else (low - room, high + room)
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    @staticmethod
    def of(values: Sequence[float], start: float, end: float) -> "Axis":
        """Wide enough for all values, with some room at the ends; a logarithm where that shows more."""
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        log = low > 0 and high / low >= LOG_FROM_RATIO
        if log:
            room = (high / low) ** PADDING
            return Axis(low / room, high * room, start, end, log=True)
        room = (high - low) * PADDING
        return Axis(low - room, high + room, start, end)

    def at(self, value: float) -> float:
        """The pixel of a value, within the axis."""
        value = min(max(value, self.low), self.high)
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            if last - first >= 1:
                return [10.0**power for power in range(first, last + 1, 1 + (last - first) // NUM_TICKS)]
        step = _round_step((self.high - self.low) / NUM_TICKS)
        first_index, last_index = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first_index, last_index + 1)]


def short(value: object) -> str:
    """A value as a label: `0.012`, `3e-05`, `sgd`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.3g}"
    return f"{value:.0f}" if abs(value) < 1e6 else f"{value:.3g}"


def axes(frame: Frame, x: Axis, y: Axis, x_title: str, y_title: str) -> list[Mark]:
    """Faint lines at the ticks of y, numbers at both, and what they are."""
    marks: list[Mark] = []
    for tick in y.ticks:
        marks.append(Line(points=((frame.left, y.at(tick)), (frame.right, y.at(tick))), colour=FAINT))
        marks.append(Words(x=frame.left - 6, y=y.at(tick) + 4, text=short(tick), size=11, anchor="end", colour=SOFT))
    for tick in x.ticks:
        marks.append(Line(points=((x.at(tick), frame.bottom), (x.at(tick), frame.bottom + 4)), colour=SOFT))
        marks.append(Words(x=x.at(tick), y=frame.bottom + 17, text=short(tick), size=11, anchor="middle", colour=SOFT))
    marks.append(Line(points=((frame.left, frame.bottom), (frame.right, frame.bottom)), colour=SOFT))
    marks.append(Words(x=frame.right, y=frame.bottom + 33, text=x_title, size=11, anchor="end", colour=SOFT))
    marks.append(Words(x=frame.left, y=frame.top - 8, text=y_title, size=11, colour=SOFT))
    return marks


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= step - 1e-12 * power) * power
