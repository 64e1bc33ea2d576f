"""A scene as a PNG file, drawn by Pillow with its own font: no fonts of the machine, no display."""

from pathlib import Path
from typing import Any

from racimo.client.pictures.scene import PAPER, Box, Dot, Line, Mark, Scene, Words
from racimo.spec.errors import RacimoError

SCALE = 2
"""Pixels of the file to one of the scene: sharp on a dense screen and on paper."""
FINER = 2
"""It is drawn so many times larger and shrunk: Pillow's own lines have stairs."""


def write_png(scene: Scene, path: Path) -> None:
    """`RacimoError`: `extra-missing` without Pillow."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise RacimoError(
            "extra-missing", "a PNG is drawn by Pillow, which is not installed here (an .html needs nothing)",
            "pip install 'racimo[tune]'",
        ) from None  # fmt: skip
    scale = SCALE * FINER
    image = Image.new("RGB", (scene.width * scale, scene.height * scale), PAPER)
    pen = ImageDraw.Draw(image, "RGBA")
    fonts: dict[float, Any] = {}
    for mark in scene.marks:
        if isinstance(mark, Words) and mark.size not in fonts:
            fonts[mark.size] = ImageFont.load_default(mark.size * scale)
        _draw(pen, mark, scale, fonts)
    small = image.resize((scene.width * SCALE, scene.height * SCALE), Image.Resampling.LANCZOS)
    small.save(path, format="PNG", optimize=True)


def _draw(pen: Any, mark: Mark, scale: int, fonts: dict[float, Any]) -> None:
    match mark:
        case Line():
            points = [(x * scale, y * scale) for x, y in mark.points]
            pen.line(points, fill=_paint(mark.colour, mark.opacity), width=max(1, round(mark.width * scale)))
        case Dot():
            x, y, radius = mark.x * scale, mark.y * scale, mark.radius * scale
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_paint(mark.colour, mark.opacity))
        case Box():
            x, y = mark.x * scale, mark.y * scale
            pen.rectangle(
                (x, y, x + mark.width * scale, y + mark.height * scale), fill=_paint(mark.colour, mark.opacity)
            )
        case Words():
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[mark.anchor]
            stroke = round(scale * 0.2) if mark.bold else 0
            pen.text(
                (mark.x * scale, mark.y * scale), mark.text, fill=mark.colour, font=fonts[mark.size], anchor=anchor,
                stroke_width=stroke, stroke_fill=mark.colour,
            )  # fmt: skip


def _paint(colour: str, opacity: float) -> tuple[int, int, int, int]:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue, round(opacity * 255)
