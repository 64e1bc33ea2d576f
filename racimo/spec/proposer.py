"""What proposes points by what was learnt: the interface that built-in proposers and a user's own class follow.

A study's `proposer: FILE.py:CLASS` names a class of the run's files. It is constructed as `CLASS(space, objectives,
seed)` in a process of its own, told what is known, and asked for points. That process may be ended and begun anew at
any time; it is then told everything again, so what a proposer does should follow from what it was told and the seed.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

from racimo.spec.space import Scalar

Values = dict[str, Scalar]

MAX_COUNT = 1_000
"""Points that are asked for at a time."""
NUM_NEWEST = 300
NUM_BEST = 100
WINDOW_STEP = 100
"""A proposer knows the newest `NUM_NEWEST` to `NUM_NEWEST + WINDOW_STEP` trials, and of those before them the ones that
are among the best `NUM_BEST` of all, however many there are: memory stays bounded, and so does the time of an answer
(TPE, 8 parameters, on one core of the test machine: 3 ms of 100 trials, 7 of 500, 15 of 1,200). The window moves in
steps, so that what it leaves out follows from the number of trials alone."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of one trial. `status` as `TrialStatus`: waiting and running ones have no final result yet, paused
    ones may go on, diverged ones told a metric that is not finite, failed ones raised or lost their worker too often.

    `rounds`: how often it has reported. `metrics`: what it reported last under each name. `curve`: the first objective
    as it was after so many rounds, at those at which the scheduler compares trials."""

    number: int
    values: Values
    status: Literal["waiting", "running", "paused", "finished", "stopped", "diverged", "failed"]
    rounds: int = 0
    metrics: dict[str, float] = {}
    curve: tuple[tuple[int, float], ...] = ()


class Suggestion(msgspec.Struct, frozen=True, kw_only=True):
    """A point and what found it, as it is shown: a proposer may call one random."""

    values: Values
    by: str


@runtime_checkable
class Proposer(Protocol):
    """Constructed with `space` (a `Space`), `objectives` (each with `metric` and `minimize`) and `seed`.

    It may have a method `forget(numbers)`: those trials are no longer among what is to be known (see `NUM_NEWEST`), and
    are told again if that changes."""

    def tell(self, results: Sequence[Outcome]) -> None:
        """What is new or has changed since the last call, by trial number ascending."""

    def ask(self, count: int) -> Sequence[Mapping[str, Scalar] | Suggestion]:
        """Up to `count` points for the trials that are numbered next, each a value for every active parameter, by name.

        None at all: there is nothing more to try, and the study ends with what it has. A point outside the space, and
        whatever is raised, fails the study."""


def window_from(num_trials: int) -> int:
    """The number of the first trial that counts among the newest."""
    return max(0, num_trials - NUM_NEWEST) // WINDOW_STEP * WINDOW_STEP
