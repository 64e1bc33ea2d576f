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

STYLES = {
    "running": "green", "succeeded": "green", "queued": "yellow", "paused": "yellow", "pausing": "yellow",
    "stopping": "yellow", "failed": "red", "lost": "red", "wrong": "red", "ok": "green", "note": "yellow",
}  # fmt: skip


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
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, columns: int, colour: bool, right: Sequence[str] = ()
) -> str:
    """Columns as wide as their content; the last one is cut where the terminal ends."""
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    blank = Box("    \n" * 8)
    made = Table(box=blank, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold", border_style="none")
    for title in titles:
        last = title == titles[-1]
        made.add_column(
            Text(title),
            justify="right" if title in right else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=6 if last else len(title),
        )
    for row in rows:
        made.add_row(*(Text(cell, style=STYLES.get(cell, "") if colour else "") for cell in row))
    console = Console(
        width=columns, force_terminal=colour, color_system="standard" if colour else None, highlight=False, markup=False
    )
    with console.capture() as captured:
        console.print(made)
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))
