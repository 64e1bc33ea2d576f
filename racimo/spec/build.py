"""From loose fields (YAML, flags, Python keywords) to a `RunSpec`; what does not fit is said with the field's name."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from racimo.spec.errors import RacimoError
from racimo.spec.run import CheckpointSpec, RunSpec
from racimo.spec.study import StudySpec

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")


class FieldError(ValueError):
    """A field that does not fit. `field` is its dotted path (`checkpoint.every`), "" for the spec as a whole."""

    def __init__(self, field: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.message = message
        self.hint = hint

    def as_racimo_error(self, place: str = "") -> RacimoError:
        """`place` says where it stands: `spec.yaml line 3: `."""
        return RacimoError("invalid-spec", place + self.message, self.hint)


def closest(word: str, known: Iterable[str]) -> str:
    """The known word that `word` was probably meant to be, or ""."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), "")


def field_names() -> tuple[str, ...]:
    """The fields of a run as a user may write them, in the order of the spec."""
    return tuple(name for name in RunSpec.__struct_fields__ if name not in ("snapshot", "requirements"))


def build_spec(fields: Mapping[str, Any]) -> RunSpec:
    """Checks and converts. Raises `FieldError` naming the field, what was found, and the closest known field."""
    _refuse_unknown(fields, field_names(), "")
    checkpoint = fields.get("checkpoint")
    if isinstance(checkpoint, Mapping):
        _refuse_unknown(checkpoint, CheckpointSpec.__struct_fields__, "checkpoint.")
    study = fields.get("study")
    if isinstance(study, Mapping):
        _refuse_unknown(study, StudySpec.__struct_fields__, "study.")
    try:
        return msgspec.convert(dict(fields), RunSpec)
    except msgspec.ValidationError as error:
        text = str(error)
        match = _PATH.search(text)
        path = match[1] if match else ""
        message = text[: match.start()] if match else text
        name = re.split(r"[.\[]", path)[0]
        if message.startswith("Expected ") and name:
            message = f"{path}: e{message[1:].replace('`', '')}"
        raise FieldError(name or _mentioned(message, fields), message) from None


def _refuse_unknown(fields: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> None:
    for name in fields:
        if name in known:
            continue
        near = closest(str(name), known)
        hint = f"did you mean {prefix}{near}?" if near else f"known fields: {', '.join(known)}"
        raise FieldError(prefix + str(name), f"unknown field {prefix}{name}", hint)


def _mentioned(message: str, fields: Mapping[str, Any]) -> str:
    """The first given field that a whole-spec message speaks of; such messages name fields in plain words."""
    words = re.findall(r"[a-z_]+", message)
    names = [name for word in words for name in fields if word in (name, name.removesuffix("s"))]
    return names[0] if names else ""
