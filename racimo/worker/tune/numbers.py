"""Reported values are numbers."""

from typing import Any

from racimo.spec.errors import RacimoError


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """`RacimoError` naming a value that is no number."""
    found: dict[str, float] = {}
    for name, value in values.items():
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            found[str(name)] = float(value)
        except (TypeError, ValueError):
            raise RacimoError(
                "metric-invalid",
                f"{name} was reported as {value!r:.80}, a {type(value).__name__}, which is not a number",
                f"run.report({name}=float(...))",
            ) from None
    return found
