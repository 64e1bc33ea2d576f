"""From a function and loose fields to those of a tune run."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from racimo.spec.errors import RacimoError
from racimo.spec.study import StudySpec


def tune_fields(function: Callable[..., Any] | str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The run's fields, those of the study apart. `RacimoError` function-missing for what is in no file."""
    known = StudySpec.__struct_fields__
    study = {name: value for name, value in fields.items() if name in known}
    rest = {name: value for name, value in fields.items() if name not in known}
    return {"tune": function if isinstance(function, str) else _place_of(function), "study": study, **rest}


def _place_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", "")
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    if file is None or not Path(file).exists() or not name.isidentifier():
        raise RacimoError(
            "function-missing",
            f"{name or function!r} is no function at the top of a file: workers could not import it",
            "put it into a file, and give it as FILE.py:FUNCTION",
        )
    return f"{file}:{name}"
