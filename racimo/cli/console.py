"""Writing for people and for programs: data on stdout, talk on stderr, colour only on a terminal without NO_COLOR."""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

import msgspec

from racimo.spec.errors import RacimoError

WIDE = 500
"""Columns where nobody looks at a terminal: nothing is cut off."""

GAP = "  "
LEAST_LAST = 24
BOLD, RED, GREEN, YELLOW = 1, 31, 32, 33
STYLES = {
    "running": GREEN, "succeeded": GREEN, "queued": YELLOW, "paused": YELLOW, "pausing": YELLOW, "stopping": YELLOW,
    "failed": RED, "lost": RED, "wrong": RED, "ok": GREEN, "note": YELLOW, "up": GREEN, "silent": RED,
    "draining": YELLOW, "drained": YELLOW, "finished": GREEN, "diverged": RED,
}  # fmt: skip
"""Colours of the words that say how something is (numbers of the terminal's own)."""


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def width(stream: TextIO | None = None) -> int:
    return shutil.get_terminal_size((80, 24)).columns if is_terminal(stream or sys.stdout) else WIDE


def has_colour(stream: TextIO) -> bool:
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def write(text: str) -> None:
    """Data, to stdout."""
    print(text)


def talk(text: str) -> None:
    print(f"racimo: {text}", file=sys.stderr, flush=True)


def write_json(value: Any) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)


def print_error(error: RacimoError, *, as_json: bool = False) -> None:
    if as_json:
        fields = {"code": error.code, "message": error.message, "hint": error.hint}
        print(msgspec.json.encode(fields).decode(), file=sys.stderr)
        return
    print("\n".join(error_lines(error)), file=sys.stderr)


def error_lines(error: RacimoError) -> list[str]:
    if error.code == "syntax-error":  # as Python itself shows it
        return [error.message, "racimo: nothing was submitted [syntax-error]"]
    lines = [f"racimo: {error.message} [{error.code}]"]
    return lines + [f"  {line}" for line in error.hint.splitlines()]


def table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    columns: int,
    colour: bool,
    right: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> str:
    """Columns as wide as their content, the last one cut where the terminal ends. Where that leaves less than
    `LEAST_LAST` for it, `optional` columns are left out, in their order."""
    kept = list(range(len(titles)))
    cells = [list(titles), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in kept]
    for title in optional:
        if columns - _taken(kept, widths) >= min(LEAST_LAST, widths[-1]):
            break
        kept.remove(titles.index(title))
    room = max(1, columns - _taken(kept, widths))
    lines = []
    for number, row in enumerate(cells):
        parts = []
        for i in kept:
            text = row[i] if i != kept[-1] else _cut(row[i], room)
            size = widths[i] if i != kept[-1] else 0
            padded = text.rjust(size) if titles[i] in right else text.ljust(size)
            parts.append(_painted(padded, text, is_title=number == 0) if colour else padded)
        lines.append(GAP.join(parts).rstrip())
    return "\n".join(lines)


def _taken(kept: list[int], widths: list[int]) -> int:
    """Columns of the terminal before the last column of the table."""
    return sum(widths[i] + len(GAP) for i in kept[:-1])


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def _painted(padded: str, text: str, *, is_title: bool) -> str:
    code = BOLD if is_title else STYLES.get(text.partition(" ")[0], 0)
    return f"\x1b[{code}m{padded}\x1b[0m" if code else padded
