"""Points that need no history: what the user named, random, grid and quasi-random ones.

Every draw is a pure function of the run's seed and its number, so a restart goes on where it was. A point that is there
already, or that breaks a constraint, is passed over.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from racimo.spec.space import Values
from racimo.spec.study import PURE_PROPOSERS
from racimo.state.events import TrialsProposed
from racimo.state.study import Study
from racimo.state.trials import Proposal

MAX_PASSED_OVER = 1_000
"""Draws in a row that may be unusable before a space counts as used up."""
NUM_FIRST_RANDOM = 10
"""Random points before a proposer that learns has anything to learn from."""
_HALTON_SKIP = 20
"""The first points of the sequence lie on a line in high dimensions."""


def propose(study: Study, run: str, seed: int, count: int) -> TrialsProposed | None:
    """Up to `count` new trials of those that can be drawn without history; None if there are none to be drawn now."""
    first, drawn = len(study.trials), []
    num_named = len(study.first_points)
    for position in range(first, min(num_named, first + count)):
        drawn.append(Proposal(values=study.first_points[position], by="user"))
    pure = study.terms.proposer in PURE_PROPOSERS
    until = study.terms.trials if pure else min(num_named + NUM_FIRST_RANDOM, study.terms.trials)
    wanted = min(count, until - first) - len(drawn)
    exhausted = False
    if wanted > 0 and not study.exhausted:
        found = _draw(study, study.terms.proposer if pure else "random", seed, wanted, drawn)
        exhausted = len(found) < wanted
        drawn += found
    if not drawn and not exhausted:
        return None
    return TrialsProposed(run=run, first=first, proposals=tuple(drawn), exhausted=exhausted)


def draw_random(study: Study, seed: int, count: int, beside: Sequence[Proposal]) -> list[Proposal]:
    """Up to `count` random points that are neither there nor among `beside`; fewer where the space is used up."""
    return _draw(study, "random", seed, count, beside)


def _draw(study: Study, by: str, seed: int, count: int, beside: Sequence[Proposal]) -> list[Proposal]:
    found: list[Proposal] = []
    passed_over = 0
    taken = [proposal.values for proposal in beside]
    for draw, values in _draws(study, by, seed):
        if values in taken or study.known(values) is not None or study.space.broken_constraint(values):
            passed_over += 1
            if passed_over >= MAX_PASSED_OVER and by != "grid":
                break
            continue
        passed_over = 0
        found.append(Proposal(values=values, by=by, draw=draw))
        taken.append(values)
        if len(found) >= count:
            break
    return found


def _draws(study: Study, by: str, seed: int) -> Iterator[tuple[int, Values]]:
    """From the first draw that was not yet made, without end (a grid's end is its own)."""
    space, draw = study.space, study.num_draws
    if by == "grid":
        for index in range(draw, space.num_points or 0):
            yield index, space.grid_point(index)
        return
    dimensions = len(space.parameters)
    while True:
        if by == "quasi-random":
            yield draw, space.at([halton(draw + _HALTON_SKIP, axis, seed) for axis in range(dimensions)])
        else:
            yield draw, space.at([uniform("draw", seed, draw, axis) for axis in range(dimensions)])
        draw += 1


def halton(index: int, axis: int, seed: int) -> float:
    """The `index`th point's coordinate on one axis, in [0, 1): the radical inverse in the axis's prime with its digits
    permuted anew at each place (Owen 2017, "A randomized Halton algorithm in R")."""
    base = _primes()[axis]
    places = math.ceil(53 / math.log2(base))
    value, scale, rest = 0.0, 1.0 / base, index
    for place in range(places):
        rest, digit = divmod(rest, base)
        value += _permutation(base, axis, place, seed)[digit] * scale
        scale /= base
    return min(value, 1.0 - 2.0**-53)


@lru_cache(maxsize=65_536)
def _permutation(base: int, axis: int, place: int, seed: int) -> tuple[int, ...]:
    return tuple(sorted(range(base), key=lambda digit: uniform("halton", seed, axis, place, digit)))


def uniform(*key: str | int) -> float:
    """A number in [0, 1) that follows from the key alone and looks random: 53 bits of a hash."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


@lru_cache(maxsize=1)
def _primes() -> tuple[int, ...]:
    """One for each axis that a space may have."""
    found: list[int] = []
    candidate = 2
    while len(found) < 200:
        if all(candidate % prime for prime in found if prime * prime <= candidate):
            found.append(candidate)
        candidate += 1
    return tuple(found)
