"""A search space: parameters with their ranges, conditions between them, and constraints over them.

A parameter is written as text (`0.0..1.0`, `log 1e-5..1e-1`, `1..8`, `32..256 step 32`), as a list of choices, or as
a mapping with `is` and `when`: `{is: 0.9..0.999, when: {optimizer: adam}}`. Whole numbers on both ends make an integer.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from racimo.spec.expression import Expression

Scalar = bool | int | float | str | None
Values = dict[str, Scalar]
"""A point: the value of each active parameter, in the order of the space."""

MAX_PARAMETERS = 200
MAX_CHOICES = 10_000
MAX_CONSTRAINTS = 100
NAME_PATTERN = r"[A-Za-z_][A-Za-z0-9_.]{0,99}"
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"\s*(log\s+)?({_NUMBER})\s*\.\.\s*({_NUMBER})(?:\s+step\s+({_NUMBER}))?\s*")
_WHOLE = re.compile(r"[-+]?\d+")


class Parameter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One dimension. `low` and `high` are included; `step` 0 is none. `when`: it is active only where each named
    parameter has one of those values."""

    kind: Literal["float", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float = 0.0
    choices: tuple[Scalar, ...] = ()
    when: dict[str, tuple[Scalar, ...]] = {}

    def __post_init__(self) -> None:
        if self.kind == "choice":
            self._check_choices()
            return
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            raise ValueError(f"a range is finite, not {self.low}..{self.high}")
        if self.low > self.high:
            raise ValueError(f"a range goes from the lower to the higher end, not {_number(self.low)}..{self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"a log range begins above 0, not at {_number(self.low)}")
        if self.step < 0 or (self.log and self.step):
            raise ValueError("a step is positive, and a log range has none")

    def _check_choices(self) -> None:
        if not self.choices:
            raise ValueError("a list of choices holds at least one")
        if len(self.choices) > MAX_CHOICES:
            raise ValueError(f"at most {MAX_CHOICES} choices, not {len(self.choices)}")
        if len({identity(choice) for choice in self.choices}) < len(self.choices):
            raise ValueError("the same choice stands twice in a list")
        if any(isinstance(choice, float) and not math.isfinite(choice) for choice in self.choices):
            raise ValueError("choices are finite")

    @property
    def num_values(self) -> int | None:
        """How many values it can have; None for a continuum."""
        if self.kind == "choice":
            return len(self.choices)
        if self.low == self.high:
            return 1
        step = self.step or (1.0 if self.kind == "int" else 0.0)
        return int((self.high - self.low) / step + 1e-9) + 1 if step else None

    def value(self, index: int) -> Scalar:
        """The `index`th of `num_values`."""
        if self.kind == "choice":
            return self.choices[index]
        value = self.low + index * (self.step or 1.0)
        return int(value) if self.kind == "int" else value

    def at(self, unit: float) -> Scalar:
        """The value at a position in [0, 1): evenly, or evenly in the logarithm."""
        count = self.num_values
        if count is not None and not self.log:
            return self.value(min(int(unit * count), count - 1))
        if self.kind == "int":  # half a value beyond both ends, so that the ends are as likely as the rest
            low, high = math.log(self.low - 0.5), math.log(self.high + 0.5)
            return min(max(round(math.exp(low + unit * (high - low))), int(self.low)), int(self.high))
        if not self.log:
            return self.low + unit * (self.high - self.low)
        low, high = math.log(self.low), math.log(self.high)
        return min(max(math.exp(low + unit * (high - low)), self.low), self.high)

    def unit_of(self, value: Scalar) -> float:
        """The position in [0, 1] of a value; the inverse of `at` up to rounding."""
        if self.kind == "choice":
            return (self._index_of(value) + 0.5) / len(self.choices)
        assert isinstance(value, int | float)
        if self.low == self.high:
            return 0.5
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def _index_of(self, value: Scalar) -> int:
        wanted = identity(value)
        return next(index for index, choice in enumerate(self.choices) if identity(choice) == wanted)

    def refuse(self, value: Scalar) -> str:
        """Why it cannot have this value; "" if it can."""
        if self.kind == "choice":
            if any(identity(choice) == identity(value) for choice in self.choices):
                return ""
            return f"{value!r} is none of {', '.join(repr(choice) for choice in self.choices[:8])}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{value!r} is not a number"
        if not math.isfinite(value) or not self.low <= value <= self.high:
            return f"{value!r} is not within {self}"
        if self.kind == "int" and value != int(value):
            return f"{value!r} is not a whole number"
        if self.step:
            steps = (value - self.low) / self.step
            if abs(steps - round(steps)) > 1e-6:
                return f"{value!r} is not on a step of {self}"
        return ""

    def __str__(self) -> str:
        if self.kind == "choice":
            return "[" + ", ".join(str(choice) for choice in self.choices) + "]"
        show = (lambda value: str(int(value))) if self.kind == "int" else _number
        step = f" step {show(self.step)}" if self.step else ""
        return f"{'log ' if self.log else ''}{show(self.low)}..{show(self.high)}{step}"


class Space(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All parameters by name, in an order in which each stands after those that its `when` names, and constraints such
    as `width * layers <= 2048` that every point meets (those that name an inactive parameter do not count there).

    `ValueError`: empty, a condition that names nothing or can never hold, a circle of conditions."""

    parameters: dict[str, Parameter]
    constraints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError("the space is empty: name at least one parameter")
        if len(self.parameters) > MAX_PARAMETERS or len(self.constraints) > MAX_CONSTRAINTS:
            raise ValueError(f"at most {MAX_PARAMETERS} parameters and {MAX_CONSTRAINTS} constraints")
        for name, parameter in self.parameters.items():
            if not re.fullmatch(NAME_PATTERN, name):
                raise ValueError(f"parameters are named with letters, digits, _ and dots, not {name!r}")
            for other, values in parameter.when.items():
                self._check_condition(name, other, values)
        if tuple(self.parameters) != (ordered := self._in_order()):
            msgspec.structs.force_setattr(self, "parameters", {name: self.parameters[name] for name in ordered})
        for constraint in self.constraints:
            Expression(constraint, tuple(self.parameters))

    def _check_condition(self, name: str, other: str, values: tuple[Scalar, ...]) -> None:
        found = self.parameters.get(other)
        if found is None or other == name:
            raise ValueError(f"{name} depends on {other}, which is no other parameter")
        if not values:
            raise ValueError(f"{name} depends on {other} having one of no values")
        for value in values:
            if why := found.refuse(value):
                raise ValueError(f"{name} is active when {other} is {value!r}, which it never is: {why}")

    def _in_order(self) -> tuple[str, ...]:
        ordered: dict[str, None] = {}
        waiting = dict(self.parameters)
        while waiting:
            free = [name for name, one in waiting.items() if all(other in ordered for other in one.when)]
            if not free:
                raise ValueError(f"the conditions of {', '.join(waiting)} depend on each other in a circle")
            for name in free:
                ordered[name] = None
                del waiting[name]
        return tuple(ordered)

    @property
    def num_points(self) -> int | None:
        """How many different points there are, constraints not counted; None for infinitely many.

        Conditions are counted by the branches that they leave out."""
        if any(parameter.num_values is None for parameter in self.parameters.values()):
            return None
        if not any(parameter.when for parameter in self.parameters.values()):
            return math.prod(parameter.num_values or 1 for parameter in self.parameters.values())
        return _num_points(list(self.parameters.items()), {})

    def active(self, name: str, values: Mapping[str, Scalar]) -> bool:
        """Whether a parameter is, given the values of those before it."""
        return all(
            other in values and any(identity(values[other]) == identity(value) for value in allowed)
            for other, allowed in self.parameters[name].when.items()
        )

    def at(self, units: Sequence[float]) -> Values:
        """The point at a position of the unit cube, one coordinate for each parameter (active or not), in order."""
        values: Values = {}
        for (name, parameter), unit in zip(self.parameters.items(), units, strict=True):
            if self.active(name, values):
                values[name] = parameter.at(unit)
        return values

    def grid_point(self, index: int) -> Values:
        """The `index`th point of the grid, the last parameter changing fastest. Only where `num_points` is finite."""
        values: Values = {}
        names = list(self.parameters)
        for position, name in enumerate(names):
            if not self.active(name, values):
                continue
            rest = [(other, self.parameters[other]) for other in names[position + 1 :]]
            parameter = self.parameters[name]
            for choice in range(parameter.num_values or 1):
                values[name] = parameter.value(choice)
                size = _num_points(rest, values)
                if index < size:
                    break
                index -= size
            else:
                raise IndexError(f"the grid has only {self.num_points} points")
        return values

    def complete(self, given: Mapping[str, Scalar], *, constraints: bool = True) -> Values:
        """A point a person named, in the order of the space. Whole numbers become floats where a float belongs.

        `ValueError`: an unknown or missing parameter, a value outside its range, one of an inactive parameter; a broken
        constraint, unless `constraints` do not matter."""
        for name in given:
            if name not in self.parameters:
                raise ValueError(f"there is no parameter {name}; there are {', '.join(self.parameters)}")
        values: Values = {}
        for name, parameter in self.parameters.items():
            if not self.active(name, values):
                if name in given:
                    raise ValueError(f"{name} is given, but inactive: {_condition(parameter)}")
                continue
            if name not in given:
                raise ValueError(f"{name} is missing")
            value = given[name]
            if why := parameter.refuse(value):
                raise ValueError(f"{name}: {why}")
            if parameter.kind == "choice":
                value = parameter.choices[parameter._index_of(value)]
            values[name] = _as_kind(parameter, value)
        if constraints and (broken := self.broken_constraint(values)):
            raise ValueError(f"it breaks the constraint {broken}")
        return values

    def broken_constraint(self, values: Mapping[str, Scalar]) -> str:
        """The first constraint that a point does not meet; "" if none. Arithmetic that fails counts as broken."""
        for constraint in self.constraints:
            expression = Expression(constraint, tuple(self.parameters))
            if expression.names <= values.keys() and not expression.holds(values):
                return constraint
        return ""


def _num_points(parameters: list[tuple[str, Parameter]], values: Values) -> int:
    """Of these parameters, given values of those before them."""
    if not parameters:
        return 1
    (name, parameter), rest = parameters[0], parameters[1:]
    met = all(
        other in values and any(identity(values[other]) == identity(value) for value in allowed)
        for other, allowed in parameter.when.items()
    )
    if not met:
        return _num_points(rest, values)
    count = parameter.num_values or 1
    if not any(name in other.when for _, other in rest):
        return count * _num_points(rest, values)
    return sum(_num_points(rest, {**values, name: parameter.value(index)}) for index in range(count))


def parse_parameter(written: Any) -> Parameter:
    """A parameter as a person writes it; see the module. `ValueError` says what was found and what is accepted."""
    if isinstance(written, Parameter):
        return written
    if isinstance(written, Mapping) and "is" in written:
        extra = [name for name in written if name not in ("is", "when")]
        if extra:
            raise ValueError(f"a parameter's mapping has `is` and `when`, not {extra[0]}")
        when = written.get("when") or {}
        if not isinstance(when, Mapping):
            raise ValueError(f"`when` maps parameters to the values that they must have, not {when!r}")
        conditions = {
            str(name): tuple(value) if isinstance(value, list | tuple) else (value,) for name, value in when.items()
        }
        return msgspec.structs.replace(parse_parameter(written["is"]), when=conditions)
    if isinstance(written, Mapping):
        try:
            return msgspec.convert(dict(written), Parameter)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None
    if isinstance(written, list | tuple):
        if not all(isinstance(choice, bool | int | float | str | None) for choice in written):
            raise ValueError("choices are texts, numbers, true, false or null")
        return Parameter(kind="choice", choices=tuple(written))
    if isinstance(written, bool | int | float):
        return Parameter(kind="choice", choices=(written,))
    if not isinstance(written, str):
        raise ValueError(f"a parameter is a range such as 0.1..0.9, or a list of choices, not {written!r}")
    match = _RANGE.fullmatch(written)
    if match is None:
        raise ValueError(
            f"a parameter is a range such as 0.1..0.9, log 1e-5..1e-1 or 1..8, or a list of choices, not {written!r}"
        )
    log, low, high, step = match.groups()
    whole = all(_WHOLE.fullmatch(text) for text in (low, high, step or "1"))
    return Parameter(
        kind="int" if whole else "float", low=float(low), high=float(high), log=bool(log), step=float(step or 0)
    )


def identity(value: Scalar) -> tuple[str, Scalar]:
    """Tells true from 1 and "1" from 1, but not 1 from 1.0."""
    kind = "bool" if isinstance(value, bool) else "number" if isinstance(value, int | float) else type(value).__name__
    return kind, value


def key_of(values: Mapping[str, Scalar]) -> tuple[tuple[str, tuple[str, Scalar]], ...]:
    """A hashable form in which equal points are equal."""
    return tuple((name, identity(values[name])) for name in sorted(values))


def differences(old: Space, new: Space) -> list[str]:
    """What changed from one space to another, a line each."""
    lines = []
    for name in dict.fromkeys((*old.parameters, *new.parameters)):
        before, after = old.parameters.get(name), new.parameters.get(name)
        if before != after:
            lines.append(f"{name}: {_full(before)} -> {_full(after)}")
    gone, came = set(old.constraints) - set(new.constraints), set(new.constraints) - set(old.constraints)
    return [
        *lines,
        *(f"constraint no more: {text}" for text in sorted(gone)),
        *(f"constraint: {t}" for t in sorted(came)),
    ]


def _full(parameter: Parameter | None) -> str:
    if parameter is None:
        return "none"
    return str(parameter) + (f" ({_condition(parameter)})" if parameter.when else "")


def _condition(parameter: Parameter) -> str:
    return "when " + " and ".join(f"{name} is {_one_of(values)}" for name, values in parameter.when.items())


def _one_of(values: Iterable[Scalar]) -> str:
    return " or ".join(str(value) for value in values)


def _as_kind(parameter: Parameter, value: Scalar) -> Scalar:
    if parameter.kind == "float":
        return float(value)  # type: ignore[arg-type]
    return int(value) if parameter.kind == "int" else value  # type: ignore[arg-type]


def _number(value: float) -> str:
    return repr(value)
