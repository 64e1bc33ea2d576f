"""The charts of one study: how it went, what mattered, which values the good trials have, and every trial's curve."""

import math
from collections.abc import Sequence
from typing import TypeVar

from racimo.client.importance import Importance
from racimo.client.pictures.axis import Axis, axes, short
from racimo.client.pictures.scene import (
    BLUE,
    FAINT,
    INK,
    ORANGE,
    PAPER,
    RED,
    SOFT,
    Box,
    Dot,
    Frame,
    Line,
    Mark,
    Words,
    ramp,
)
from racimo.client.trial_table import TrialTable
from racimo.control.views import TrialView
from racimo.spec.space import Parameter

Item = TypeVar("Item")

MAX_DOTS = 5_000
MAX_LINES = 400
MAX_BARS = 12
MAX_AXES = 9
"""Parameters in parallel coordinates: the most important ones."""
ROBUST_PART = 0.95
"""Of the values, the best, that an axis shows: one trial that went astray hides not all others."""


def history(table: TrialTable, frame: Frame) -> list[Mark]:
    """Every trial's newest value, and the best so far as a line."""
    points = table.history
    metric = table.objectives[0]
    x = Axis.of([point.trial for point in points], frame.left, frame.right)
    y = Axis.of(_shown(table, [point.value for point in points]), frame.bottom, frame.top)
    marks = axes(frame, x, y, "trial", str(metric))
    for point in _spread(points, MAX_DOTS):
        trial = table.trials[point.trial]
        colour = BLUE if table.counts(trial) else RED
        place = (x.at(point.trial), y.at(point.value))
        marks.append(Dot(x=place[0], y=place[1], colour=colour, opacity=0.55, title=_title(table, trial)))
    marks += stairs([(float(point.trial), point.best) for point in points], x, y, ORANGE)
    return marks


def stairs(points: Sequence[tuple[float, float]], x: Axis, y: Axis, colour: str, title: str = "") -> list[Mark]:
    """A line that keeps its height until the next point that has another one."""
    corners: list[tuple[float, float]] = []
    for at, value in points:
        if corners and corners[-1][1] != y.at(value):
            corners.append((x.at(at), corners[-1][1]))
        elif corners and at != points[-1][0]:
            continue
        corners.append((x.at(at), y.at(value)))
    return [Line(points=tuple(corners), colour=colour, width=2, title=title)] if len(corners) > 1 else []


def bars(found: Sequence[Importance], frame: Frame) -> list[Mark]:
    """The importance of parameters; one of which too little is known says so."""
    marks: list[Mark] = []
    shown = found[:MAX_BARS]
    known = [one.share for one in shown if one.share is not None]
    if not known:
        return [Words(x=frame.left, y=frame.top + 20, text="too few trials yet", size=12, colour=SOFT)]
    height = min(26.0, frame.height / len(shown))
    left = frame.left + min(150.0, 12 + 6.6 * max(len(one.name) for one in shown))
    scale = (frame.right - left - 40) / (max(known) or 1.0)
    for place, one in enumerate(shown):
        y = frame.top + place * height
        name = one.name if len(one.name) <= 22 else one.name[:21] + "…"
        marks.append(Words(x=left - 8, y=y + height * 0.62, text=name, size=12, anchor="end"))
        if one.share is None:
            words = f"{one.num_trials} trials: too few"
            marks.append(Words(x=left, y=y + height * 0.62, text=words, size=11, colour=SOFT))
            continue
        width = max(1.0, one.share * scale)
        marks.append(Box(x=left, y=y + height * 0.15, width=width, height=height * 0.7, colour=BLUE))
        marks.append(Words(x=left + width + 6, y=y + height * 0.62, text=f"{one.share:.0%}", size=11, colour=SOFT))
    return marks


def curves(table: TrialTable, frame: Frame) -> list[Mark]:
    """Value against round, a line for each trial, the best one over the others. Empty where nobody reported twice."""
    trials = [trial for trial in table.trials.values() if len(trial.curve) > 1]
    if not trials:
        return []
    best = table.best
    drawn = [*(trial for trial in _spread(trials, MAX_LINES) if trial is not best)]
    drawn += [best] if best is not None and len(best.curve) > 1 else []
    finite = [[(r, v) for r, v in trial.curve if math.isfinite(v)] for trial in drawn]
    x = Axis.of([float(r) for curve in finite for r, _ in curve], frame.left, frame.right)
    y = Axis.of(_shown(table, [v for curve in finite for _, v in curve]), frame.bottom, frame.top)
    marks = axes(frame, x, y, "round", str(table.objectives[0]))
    for trial, curve in zip(drawn, finite, strict=True):
        points = tuple((x.at(r), y.at(v)) for r, v in curve)
        if len(points) < 2:
            continue
        if trial is best:
            marks.append(Line(points=points, colour=ORANGE, width=2.5, title=_title(table, trial)))
        else:
            colour = BLUE if table.counts(trial) else RED
            marks.append(Line(points=points, colour=colour, opacity=0.35, title=_title(table, trial)))
    return marks


def parallel(table: TrialTable, found: Sequence[Importance], frame: Frame) -> list[Mark]:
    """One vertical axis for each parameter and the metric, one line for each trial: bright ones are the best."""
    names = [one.name for one in found][:MAX_AXES]
    trials = [trial for trial in table.top(len(table.trials)) if all_known(table, trial)]
    if not names or not trials:
        return []
    gap = frame.width / len(names)
    marks: list[Mark] = []
    metric = table.objectives[0]
    inner = frame.within(top=18, bottom=22)
    y = Axis.of(_shown(table, [table.value(trial) or 0.0 for trial in trials]), inner.bottom, inner.top)
    drawn = list(enumerate(trials))
    drawn = drawn[:MAX_LINES] if len(drawn) > MAX_LINES else drawn
    for rank, trial in reversed(drawn):
        place = rank / max(1, len(trials) - 1)
        points = [
            (frame.left + i * gap, _height(table.space.parameters[name], trial, name, inner))
            for i, name in enumerate(names)
        ]
        points.append((frame.right, y.at(table.value(trial) or 0.0)))
        colour, width = (ORANGE, 2.5) if rank == 0 else (ramp((1 - place) * 0.9), 1.2)
        opacity = 1.0 if rank == 0 else 0.35 + 0.4 * (1 - place)
        marks.append(
            Line(points=tuple(points), colour=colour, width=width, opacity=opacity, title=_title(table, trial))
        )
    for i, name in enumerate(names):
        marks += _parameter_axis(table.space.parameters[name], name, frame.left + i * gap, inner)
    marks += _axis_line(frame.right, inner, str(metric))
    marks += [Words(x=frame.right + 6, y=y.at(tick) + 4, text=short(tick), size=10, colour=SOFT) for tick in y.ticks]
    return marks


def pareto(table: TrialTable, frame: Frame) -> list[Mark]:
    """The first two metrics against each other, with the front. Empty for one metric."""
    if len(table.objectives) < 2:
        return []
    trials = [t for t in table.trials.values() if table.counts(t) and table.value(t, 1) is not None]
    front = [trial for trial in table.front if table.value(trial, 1) is not None]
    x = Axis.of([table.value(trial, 0) or 0.0 for trial in trials], frame.left, frame.right)
    y = Axis.of([table.value(trial, 1) or 0.0 for trial in trials], frame.bottom, frame.top)
    marks = axes(frame, x, y, str(table.objectives[0]), str(table.objectives[1]))
    for trial in _spread(trials, MAX_DOTS):
        marks.append(Dot(x=x.at(table.value(trial, 0) or 0.0), y=y.at(table.value(trial, 1) or 0.0), colour=BLUE,
                         opacity=0.45, title=_title(table, trial)))  # fmt: skip
    places = [(x.at(table.value(trial, 0) or 0.0), y.at(table.value(trial, 1) or 0.0)) for trial in front]
    if len(places) > 1 and len(table.objectives) == 2:
        marks.append(Line(points=tuple(places), colour=ORANGE, width=1.5))
    for place, trial in zip(places, front, strict=True):
        marks.append(Dot(x=place[0], y=place[1], radius=4, colour=ORANGE, title=_title(table, trial)))
    return marks


def all_known(table: TrialTable, trial: TrialView) -> bool:
    """Whether its values lie in the space as it is now; it may have been another one."""
    parameters = table.space.parameters
    return all(name in parameters and not parameters[name].refuse(value) for name, value in trial.values.items())


def _height(parameter: Parameter, trial: TrialView, name: str, frame: Frame) -> float:
    """Where a trial's value stands on the axis; where the parameter is inactive a little below it."""
    if name not in trial.values:
        return frame.bottom + 12
    return frame.bottom - parameter.unit_of(trial.values[name]) * frame.height


def _parameter_axis(parameter: Parameter, name: str, x: float, frame: Frame) -> list[Mark]:
    marks = _axis_line(x, frame, name)
    if parameter.kind == "choice":
        step = max(1, math.ceil(len(parameter.choices) / 12))
        labels = [(parameter.unit_of(choice), short(choice)[:14]) for choice in parameter.choices[::step]]
    elif parameter.low == parameter.high:
        labels = [(0.5, short(parameter.low))]
    else:
        axis = Axis(parameter.low, parameter.high, 0.0, 1.0, log=parameter.log)
        inner = [tick for tick in axis.ticks if 0.08 < axis.at(tick) < 0.92]
        labels = [(axis.at(tick), short(tick)) for tick in (parameter.low, *inner, parameter.high)]
    for unit, text in labels:
        y = frame.bottom - unit * frame.height
        width = 6.0 * len(text) + 4
        marks.append(Box(x=x - 6 - width, y=y - 6, width=width, height=12, colour=PAPER, opacity=0.8))
        marks.append(Line(points=((x - 3, y), (x, y)), colour=INK))
        marks.append(Words(x=x - 8, y=y + 4, text=text, size=10, anchor="end"))
    return marks


def _axis_line(x: float, frame: Frame, name: str) -> list[Mark]:
    name = name if len(name) <= 18 else name[:17] + "…"
    return [
        Line(points=((x, frame.top), (x, frame.bottom)), colour=INK),
        Words(x=x, y=frame.top - 10, text=name, size=11, anchor="middle", bold=True),
    ]


def _shown(table: TrialTable, values: list[float]) -> list[float]:
    """The values that an axis makes room for: the best `ROBUST_PART`, and what is little worse."""
    ranked = sorted(values, key=table.objectives[0].signed)
    kept = ranked[: max(1, math.ceil(len(ranked) * ROBUST_PART))]
    if len(kept) < 2:
        return ranked
    spread = abs(kept[-1] - kept[0])
    return [value for value in ranked if abs(value - kept[0]) <= 2 * spread or not spread]


def _title(table: TrialTable, trial: TrialView) -> str:
    told = ", ".join(f"{name} {value:.6g}" for name, value in trial.metrics.items())
    values = "\n".join(f"{name} = {short(value)}" for name, value in trial.values.items())
    rounds = f" after {trial.rounds} rounds" if trial.rounds else ""
    return f"trial {trial.number}, {trial.status}{rounds}\n{told}\n{values}"


def _spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many, evenly from all."""
    if len(items) <= most:
        return list(items)
    step = len(items) / most
    return [items[int(index * step)] for index in range(most)]


def panel(title: str, frame: Frame, marks: Sequence[Mark]) -> list[Mark]:
    """A chart with what it shows above it."""
    head = Words(x=frame.left, y=frame.top + 14, text=title, size=14, bold=True)
    line = Line(points=((frame.left, frame.top + 22), (frame.right, frame.top + 22)), colour=FAINT)
    return [head, line, *marks]
