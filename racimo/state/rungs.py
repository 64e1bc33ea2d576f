"""Where trials stand: the rounds at which they are compared, and their curves up to there."""

from bisect import bisect_left

from racimo.spec.study import MAX_ROUNDS, StudySpec
from racimo.state.trials import MAX_CURVE_POINTS, Curve

Standing = tuple[float, int]
"""(signed value, trial): less is better, and of equals the earlier trial."""


class Rung:
    """Trials that have had so many rounds, the best first; `waiting` are those that were paused there."""

    def __init__(self) -> None:
        self.standings: list[Standing] = []
        self.waiting: list[Standing] = []

    def rank(self, standing: Standing) -> int:
        """How many are better."""
        return bisect_left(self.standings, standing)


def levels(terms: StudySpec) -> tuple[int, ...]:
    """The rounds at which trials are compared: first, first x eta, ... (freeze-thaw: half as long again each time), and
    the last if it is known. Whole numbers throughout: a logarithm would lose one where 243 is 3 to the fifth."""
    found, level = [], terms.first_round
    end = terms.rounds or MAX_ROUNDS
    while level < end:
        found.append(level)
        level = max(level + 1, level * 3 // 2) if terms.scheduler == "freeze-thaw" else level * terms.eta
    return (*found, terms.rounds) if terms.rounds else tuple(found)


def joined(before: Curve, after: Curve, kept: tuple[int, ...]) -> Curve:
    """Both curves, the first value of each round counting, thinned to `MAX_CURVE_POINTS`: every second point of the
    older half goes, but none at the rounds `kept`."""
    if not after:
        return before
    last = before[-1][0] if before else 0
    points = [*before, *(point for point in after if point[0] > last)]
    while len(points) > MAX_CURVE_POINTS:
        half = len(points) // 2
        thinned = [p for i, p in enumerate(points[:half]) if i % 2 == 0 or p[0] in kept] + points[half:]
        if len(thinned) == len(points):
            break
        points = thinned
    return tuple(points)


def remove(standings: list[Standing], standing: Standing) -> None:
    """Nothing if it is not among them."""
    at = bisect_left(standings, standing)
    if at < len(standings) and standings[at] == standing:
        del standings[at]
