"""What a scheduler may say that a free worker should do, and what a scheduler is."""

from collections.abc import Collection
from typing import Protocol

import msgspec

from racimo.spec.space import Values
from racimo.state.nouns import Reason
from racimo.state.study import Study


class Go(msgspec.Struct, frozen=True, kw_only=True):
    """The trial goes on until it has `until` rounds; 0: until its function returns."""

    trial: int
    until: int
    reason: Reason


class End(msgspec.Struct, frozen=True, kw_only=True):
    """A paused trial is given up."""

    trial: int
    reason: Reason


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """A new trial is wanted, until so many rounds. `most`: how many of them at once; 0: as many as can run."""

    until: int
    reason: Reason
    most: int = 0


class Clone(msgspec.Struct, frozen=True, kw_only=True):
    """A new trial is to begin with what `parent` has saved, at another point."""

    parent: int
    values: Values
    reason: Reason


Move = Go | End | Begin | Clone


class Scheduler(Protocol):
    """`taken`: trials that other workers were given in the same decision."""

    def next(self, study: Study, taken: Collection[int]) -> Move | None:
        """What a free worker should do; None if there is nothing for it now."""

    def otherwise(self, study: Study, taken: Collection[int]) -> Go | End | Clone | None:
        """The same, if there is no new trial to begin."""


def begins(until: int) -> Reason:
    """Of a new trial."""
    return Reason(code="begins", text="begins" + until_words(until))


def until_words(until: int) -> str:
    return f", until {until} round{'' if until == 1 else 's'}" if until else ", until its end"


def ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
