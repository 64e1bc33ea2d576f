"""Which trial is better than which, where some went further than others: what proposers learn from.

A trial that was paused tells less than one that went on. So among trials of one study the longer ones come first, and
among equally long ones the better ones; that is how Optuna's TPE orders pruned trials, and close to learning on the
highest rung that has enough of them (Falkner et al. 2018, "BOHB").
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from statistics import NormalDist

from racimo.spec.expression import Expression
from racimo.spec.proposer import Outcome
from racimo.spec.study import Objective

Standing = tuple[float, float]
"""Less is better: what kind of result it is (of a good one how far it went, negative), then the first objective."""

_INFEASIBLE, _DIVERGED = 1.0, 2.0


class Standings:
    """Reads outcomes by a study's objectives and limits.

    `levels`: rounds at which trials are compared, ascending; those between two count as equally far. Without any, all
    that are finished do, however long they took."""

    def __init__(self, objectives: Sequence[Objective], limits: Sequence[str], levels: Sequence[int] = ()) -> None:
        self.objectives = tuple(objectives)
        self._levels = tuple(levels)
        self._limits = [Expression(limit, None) for limit in limits]

    def signed(self, outcome: Outcome) -> tuple[float, ...]:
        """The objectives, less being better; infinity where it told none, or one that is not finite."""
        return tuple(one.signed(outcome.metrics.get(one.metric, math.nan)) for one in self.objectives)

    def violates(self, outcome: Outcome) -> bool:
        """It told all metrics of a limit, and does not meet it."""
        return any(limit.names <= outcome.metrics.keys() and not limit.holds(outcome.metrics) for limit in self._limits)

    def pending(self, outcome: Outcome) -> bool:
        """Nothing is known of it yet, but will be."""
        return outcome.status in ("waiting", "running") and not outcome.rounds

    def of(self, outcome: Outcome) -> Standing | None:
        """None for what tells nothing: it is pending, or failed (that may be anybody's fault)."""
        if outcome.status == "diverged":
            return _DIVERGED, math.inf
        first = self.signed(outcome)[0]
        if outcome.status == "failed" or not outcome.rounds or not math.isfinite(first):
            return None
        if self.violates(outcome):
            return _INFEASIBLE, first
        if not self._levels:
            return (-math.inf if outcome.status == "finished" else 0.0), first
        passed = bisect_right(self._levels, outcome.rounds)
        return -float(self._levels[passed - 1] if passed else 0), first


def scores(standings: Mapping[int, Standing]) -> dict[int, float]:
    """A number for each trial by which a model of real values can be learnt, less being better.

    Where all went equally far, the objective itself (of what diverged the worst of the others); else the quantiles of a
    normal distribution by rank, since values after few rounds and after many are no measure of each other."""
    good = {number: standing for number, standing in standings.items() if standing[0] < _INFEASIBLE}
    if good and len({kind for kind, _ in good.values()}) == 1:
        worst = max(value for _, value in good.values())
        return {number: standing[1] if number in good else worst for number, standing in standings.items()}
    ordered = sorted(standings.values())
    normal = NormalDist()
    return {
        number: normal.inv_cdf((bisect_left(ordered, one) + bisect_right(ordered, one)) / 2 / len(ordered))
        for number, one in standings.items()
    }
