"""Which points are taken: looked up at once, however many there are."""

from collections.abc import Collection, Iterable
from typing import Any

from racimo.spec.proposer import Outcome, Values
from racimo.spec.space import Space, key_of


def is_of(space: Space, values: Values) -> bool:
    """Whether a point lies in the space, which may have changed since it was proposed."""
    try:
        space.complete(values, constraints=False)
    except ValueError:
        return False
    return True


class Points:
    """The points of the trials that are known, by number."""

    def __init__(self) -> None:
        self._keys: dict[int, Any] = {}
        self._counts: dict[Any, int] = {}

    @property
    def next_number(self) -> int:
        """Of the trial that is proposed next."""
        return max(self._keys, default=-1) + 1

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """A trial's point never changes."""
        for outcome in outcomes:
            if outcome.number not in self._keys:
                key = self._keys[outcome.number] = key_of(outcome.values)
                self._counts[key] = self._counts.get(key, 0) + 1

    def remove(self, numbers: Collection[int]) -> None:
        for number in numbers:
            key = self._keys.pop(number, None)
            if key is not None:
                self._counts[key] -= 1
                if not self._counts[key]:
                    del self._counts[key]

    def free(self, values: Values, beside: Collection[Values]) -> bool:
        """Neither a known trial's nor one of `beside`."""
        key = key_of(values)
        return key not in self._counts and all(key != key_of(other) for other in beside)
