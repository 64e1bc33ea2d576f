"""The nouns of a tune run: proposals, trials and the slices in which trials run."""

from typing import Literal

import msgspec

from racimo.spec.space import Scalar
from racimo.state.nouns import Failure, Reason

TrialStatus = Literal["waiting", "running", "paused", "finished", "stopped", "diverged", "failed"]
"""waiting: to be begun, or begun again after its worker died. running: a slice of it is granted. paused: between two
slices. finished: its function returned, or it had all its rounds. stopped: given up. diverged: it reported NaN or
infinity. failed: its function raised, or its worker died, more often than it may."""
OVER: frozenset[str] = frozenset({"finished", "stopped", "diverged", "failed"})

SliceOutcome = Literal["reached", "finished", "diverged", "failed", "halted", "expired", "lost"]
"""reached: it has the rounds that were granted. finished: the function returned. halted: it saved and left because it
was asked to. expired: its prepaid time is used up; it saved and left. lost: its worker died before it said anything."""

MAX_CURVE_POINTS = 128
"""Of one trial, in the state; every report is in the run's report files."""

Values = dict[str, Scalar]
Curve = tuple[tuple[int, float], ...]
"""(round, value of the first objective), rounds ascending."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A point to be tried. `by`: `user`, or the name of the proposer."""

    values: Values
    by: str = ""
    draw: int = -1
    """Which draw of its proposer it is, where the decision computes it; none is made twice."""
    parent: int | None = None
    """The trial whose saved state it begins with (population based training)."""


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a slice came to. `rounds` and `step`: of the trial's newest report, all slices together; `metrics`: what
    was reported last under each name; `curve`: the rounds of this slice, thinned to `MAX_CURVE_POINTS`.

    `saved`: rounds that the state saved on this node holds. `worked_s`: seconds of monotonic time from the grant's
    arrival to the end."""

    outcome: SliceOutcome
    rounds: int = 0
    step: int = 0
    metrics: dict[str, float] = {}
    curve: Curve = ()
    saved: int = 0
    worked_s: float = 0.0
    failure: Failure | None = None


class Grant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A slice: trial `trial` may go on until it has `until` rounds (0: until its function returns), for at most
    `prepaid_s` seconds (0: for as long as it takes). `number` counts the slices of the run and is never used twice."""

    number: int
    trial: int
    worker: int
    until: int = 0
    prepaid_s: float = 0.0
    state_of: int | None = None
    """The trial whose saved state it begins with, if not its own."""
    paid_s: float = 0.0
    """Seconds of the worker's whole life that are paid for with this slice: then its agent ends it, whatever it does.
    0: no limit."""


class Trial(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One configuration. `grant`: its newest slice; it is running exactly while that has no result."""

    number: int
    values: Values
    by: str = ""
    status: TrialStatus = "waiting"
    parent: int | None = None
    rounds: int = 0
    step: int = 0
    metrics: dict[str, float] = {}
    curve: Curve = ()
    grant: Grant | None = None
    saved: int = 0
    """Rounds that its saved state holds; 0 without one."""
    saved_on: str = ""
    """The node where that state lies."""
    ran_on: str = ""
    """The node of its newest slice that has ended: should that have been lost, what it saved last lies there."""
    retries: int = 0
    granted_at_s: float = 0.0
    began_at_s: float = 0.0
    ended_at_s: float = 0.0
    device_s: float = 0.0
    cost: float = 0.0
    failure: Failure | None = None
    reason: Reason | None = None

    @property
    def over(self) -> bool:
        return self.status in OVER
