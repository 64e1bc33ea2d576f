"""Takes the values of secrets out of text before anybody sees it or it is written down."""

from collections.abc import Iterable
from typing import Any

import msgspec

from racimo.state.nouns import Failure

MASK = "***"
MIN_PART_CHARS = 4
"""Shorter lines of a secret with several lines are left alone: masking every `}` would hide the whole output."""


class Redactor:
    """Replaces each value, longest first, and each line of those that have several (logs come line by line)."""

    def __init__(self, values: Iterable[str]) -> None:
        parts: set[str] = set()
        for value in values:
            lines = [line.strip() for line in value.splitlines()]
            parts.update(line for line in lines if len(line) >= MIN_PART_CHARS)
            parts.update({value, value.strip()})
        self._parts = sorted(parts - {""}, key=lambda part: (-len(part), part))

    def text(self, text: str) -> str:
        for part in self._parts:
            if part in text:
                text = text.replace(part, MASK)
        return text

    def failure(self, failure: Failure | None) -> Failure | None:
        if failure is None or not self._parts:
            return failure
        changes: dict[str, Any] = {name: self.text(getattr(failure, name)) for name in ("message", "hint", "traceback")}
        return msgspec.structs.replace(failure, **changes)
