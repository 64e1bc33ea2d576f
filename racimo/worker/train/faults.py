"""Named points of the protocol, so that tests can end a process exactly there. Does nothing in a real run."""

from collections.abc import Callable


def _nothing(point: str, step: int) -> None:
    pass


at: Callable[[str, int], None] = _nothing
"""Called with the point's name and the number of committed steps. Only tests replace it."""


def point(name: str, step: int) -> None:
    at(name, step)
