"""Whole pictures: of one study, and of several side by side; written as PNG, SVG or a page of HTML."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

import msgspec

from racimo.client.importance import Importance
from racimo.client.pictures.axis import Axis, axes, short
from racimo.client.pictures.charts import bars, curves, history, panel, parallel, pareto, stairs
from racimo.client.pictures.png import write_png
from racimo.client.pictures.scene import SERIES, SOFT, Frame, Line, Mark, Scene, Words
from racimo.client.pictures.svg import FONT, to_svg
from racimo.client.trial_table import Point, TrialTable
from racimo.spec.errors import RacimoError

WIDTH = 1100
MARGIN = 40
TITLE_HEIGHT = 64
ROW_HEIGHT = 330
SUFFIXES = (".png", ".html", ".svg")
MAX_ROWS = 50
"""Trials in the table below the pictures of a page."""

Chart = Callable[[Frame], list[Mark]]


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One study beside others: the best value so far after each slice that ended. `per_trial`: by trials begun."""

    name: str
    way: Sequence[Point]
    per_trial: Sequence[Point]


def study_scene(name: str, summary: Sequence[str], table: TrialTable, found: Sequence[Importance]) -> Scene:
    """History, importance, curves, the front of several metrics, parallel coordinates: those with something to show.

    `summary`: words for below the title."""
    halves: list[tuple[str, Chart]] = []
    if table.history:
        halves.append(("How it went", lambda frame: history(table, frame)))
    halves.append(("What mattered", lambda frame: bars(found, frame.within(left=-46))))
    if any(len(trial.curve) > 1 for trial in table.trials.values()):
        halves.append(("Each trial, round by round", lambda frame: curves(table, frame)))
    if len(table.objectives) > 1 and table.front:
        halves.append(("The front", lambda frame: pareto(table, frame)))
    wide: list[tuple[str, Chart]] = []
    if table.top(1):
        wide.append(("Which values the good trials have", lambda frame: parallel(table, found, frame)))
    return _laid_out(name, summary, halves, wide)


def compare_scene(studies: Sequence[Compared], metric: str) -> Scene:
    """The best so far of several studies, over trials and over device-seconds."""
    over_trials = [[(float(point.trial), point.best) for point in one.per_trial] for one in studies]
    over_time = [[(point.device_s, point.best) for point in one.way] for one in studies]
    names = [one.name for one in studies]
    charts: list[tuple[str, Chart]] = [
        ("Best so far, by trials", lambda frame: _ways(over_trials, frame, "trial", metric)),
        ("Best so far, by device time", lambda frame: _ways(over_time, frame, "device-seconds", metric)),
    ]
    scene = _laid_out("Studies compared", [metric], charts, [])
    legend: list[Mark] = []
    x = float(MARGIN)
    for place, name in enumerate(names):
        colour = SERIES[place % len(SERIES)]
        legend.append(Line(points=((x, scene.height - 14.0), (x + 22, scene.height - 14.0)), colour=colour, width=3))
        legend.append(Words(x=x + 28, y=scene.height - 10.0, text=name, size=12))
        x += 48 + 7.2 * len(name)
    return msgspec.structs.replace(scene, marks=(*scene.marks, *legend))


def write_picture(scene: Scene, path: Path, *, title: str, rows: Sequence[Mapping[str, object]] = ()) -> None:
    """`.png`, `.svg` or `.html`, by the file's name. `rows`: a table for below the picture of a page.

    `RacimoError`: `invalid-request` for another kind of file, `file-unreadable` if it cannot be written."""
    check_picture(path)
    try:
        if path.suffix == ".png":
            write_png(scene, path)
        elif path.suffix == ".svg":
            path.write_text(to_svg(scene))
        else:
            path.write_text(_page(scene, title, rows))
    except OSError as error:
        raise RacimoError("file-unreadable", f"cannot write {path}: {error.strerror}") from None


def check_picture(path: Path) -> None:
    """`RacimoError`: `invalid-request` for a name that is no picture's."""
    if path.suffix not in SUFFIXES:
        raise RacimoError("invalid-request", f"a picture is a file {', '.join(SUFFIXES)}, not {path.name}")


def _laid_out(
    title: str, summary: Sequence[str], halves: Sequence[tuple[str, Chart]], wide: Sequence[tuple[str, Chart]]
) -> Scene:
    marks: list[Mark] = [
        Words(x=MARGIN, y=34, text=title, size=20, bold=True),
        Words(x=MARGIN, y=55, text="   ".join(summary), size=12, colour=SOFT),
    ]
    top = float(TITLE_HEIGHT)
    column = (WIDTH - 3 * MARGIN) / 2
    for place, (name, chart) in enumerate(halves):
        left = MARGIN + (place % 2) * (column + MARGIN)
        right = WIDTH - MARGIN if place % 2 == 0 and place == len(halves) - 1 else left + column
        outer = Frame(left, top, right, top + ROW_HEIGHT)
        marks += panel(name, outer, chart(outer.within(left=46, top=52, bottom=48, right=4)))
        if place % 2 or place == len(halves) - 1:
            top += ROW_HEIGHT
    for name, chart in wide:
        outer = Frame(MARGIN, top, WIDTH - MARGIN, top + ROW_HEIGHT)
        marks += panel(name, outer, chart(outer.within(left=60, top=42, bottom=10, right=60)))
        top += ROW_HEIGHT
    return Scene(width=WIDTH, height=int(top + 24), marks=tuple(marks))


def _ways(lines: Sequence[Sequence[tuple[float, float]]], frame: Frame, x_title: str, metric: str) -> list[Mark]:
    points = [point for line in lines for point in line]
    if not points:
        return [Words(x=frame.left, y=frame.top + 20, text="nothing told yet", size=12, colour=SOFT)]
    x = Axis.of([at for at, _ in points], frame.left, frame.right)
    y = Axis.of([value for _, value in points], frame.bottom, frame.top)
    marks = axes(frame, x, y, x_title, metric)
    for place, line in enumerate(lines):
        marks += stairs(line, x, y, SERIES[place % len(SERIES)])
    return marks


def _page(scene: Scene, title: str, rows: Sequence[Mapping[str, object]]) -> str:
    """One file without scripts; what is pointed at says what it is."""
    svg = to_svg(scene).replace("<svg ", '<svg style="max-width:100%;height:auto" ', 1)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>body{{font:14px {FONT};margin:24px auto;max-width:{WIDTH}px;color:#1b1f24;background:#fff}}"
        "table{border-collapse:collapse;font-size:13px}th,td{padding:3px 14px 3px 0;text-align:left;"
        "border-bottom:1px solid #dfe3e8;white-space:nowrap}"
        ".wide{overflow-x:auto}</style>\n"
        f"{svg}{_html_table(rows[:MAX_ROWS])}</html>\n"
    )


def _html_table(rows: Sequence[Mapping[str, object]]) -> str:
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(short(row.get(name, '')))}</td>" for name in names) + "</tr>" for row in rows
    )
    return f'<h3>Best trials</h3>\n<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>\n'
