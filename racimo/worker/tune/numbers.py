"""Reported values are numbers, and the steps they are reported for whole ones."""

import operator
from typing import Any

from racimo.spec.errors import RacimoError

MAX_STEP = 2**62
MAX_NAME_CHARS = 200


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """As plain numbers (scalars of numpy, torch and the like are taken); `RacimoError` `metric-invalid` naming a value
    that is none."""
    found: dict[str, float] = {}
    for name, value in values.items():
        _check_name(name)
        try:
            if isinstance(value, str | bytes | bytearray):
                raise TypeError
            found[name] = float(value)
        # A tensor of several elements is a RuntimeError, an array of several a TypeError, 10**400 an OverflowError.
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise RacimoError(
                "metric-invalid",
                f"{name} was reported as {_shown(value)}, a {type(value).__name__}, which is not a number",
                f"run.report({name}=float(...))",
            ) from None
    return found


def _check_name(name: Any) -> None:
    try:
        fits = isinstance(name, str) and 0 < len(name.encode()) <= MAX_NAME_CHARS
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise RacimoError(
            "metric-invalid",
            f"{ascii(name)[:80]} is no name of a metric",
            f"up to {MAX_NAME_CHARS} characters, such as loss or val/accuracy",
        )


def step_number(step: Any) -> int:
    """A step as it is counted; `RacimoError` `metric-invalid` for what is no whole number from 0 up."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise RacimoError(
            "metric-invalid",
            f"step was given as {_shown(step)}, a {type(step).__name__}, which is no whole number from 0 up",
            "run.report(step=int(...), ...), or leave it out",
        )
    return number


def _shown(value: Any) -> str:
    """A value in an error's one line, whatever its `repr` does."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - the user's own class
        return f"something whose repr raises {type(error).__name__}"
    return " ".join(text.split())[:80]
