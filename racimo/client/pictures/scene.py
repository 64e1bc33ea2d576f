"""What a picture is made of: lines, dots, boxes and words at pixel positions, y downwards."""

from typing import Literal

import msgspec

Anchor = Literal["start", "middle", "end"]

INK = "#1b1f24"
SOFT = "#6b7480"
FAINT = "#dfe3e8"
PAPER = "#ffffff"
BLUE, RED, GREEN, ORANGE, PURPLE, TEAL = "#2563c9", "#c93838", "#1d8a4b", "#d97706", "#7c4dc4", "#0e8a8a"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL, "#8a6d3b", "#5b6470")
_RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Dark to bright; told apart by those who see few colours, and in print."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    points: tuple[tuple[float, float], ...]
    colour: str = INK
    width: float = 1.0
    opacity: float = 1.0
    title: str = ""
    """Shown when pointed at, where a picture can be pointed at."""


class Dot(msgspec.Struct, frozen=True, kw_only=True):
    x: float
    y: float
    radius: float = 3.0
    colour: str = INK
    opacity: float = 1.0
    title: str = ""


class Box(msgspec.Struct, frozen=True, kw_only=True):
    x: float
    y: float
    width: float
    height: float
    colour: str = INK
    opacity: float = 1.0
    title: str = ""


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """`y` is where the letters stand."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: Anchor = "start"
    colour: str = INK
    bold: bool = False


Mark = Line | Dot | Box | Words


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    width: int
    height: int
    marks: tuple[Mark, ...]


class Frame(msgspec.Struct, frozen=True):
    """A rectangle of the picture."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.bottom - self.top

    def within(self, *, left: float = 0, top: float = 0, right: float = 0, bottom: float = 0) -> "Frame":
        return Frame(self.left + left, self.top + top, self.right - right, self.bottom - bottom)


def ramp(place: float) -> str:
    """A colour for a place from 0 (dark) to 1 (bright)."""
    at = min(max(place, 0.0), 1.0) * (len(_RAMP) - 1)
    index = min(int(at), len(_RAMP) - 2)
    part = at - index
    mixed = (round(a + (b - a) * part) for a, b in zip(_RAMP[index], _RAMP[index + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)
