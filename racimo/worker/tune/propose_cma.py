"""CMA-ES as a proposer, by the `cmaes` package that Optuna's own sampler uses.

Optuna keeps the strategy's state as text in its trials, in the order in which its workers happened to ask. Here it is
computed from the trials that are known: they are cut into generations by number, the strategy goes through them one by
one, and the next point is drawn with a seed that follows from the trial's number. So it is the same after any restart.
"""

from collections.abc import Collection, Sequence

import numpy as np
from cmaes import CMA

from racimo.decide.tune.draw import uniform
from racimo.spec.proposer import Outcome, Suggestion, Values
from racimo.spec.space import Space
from racimo.spec.study import Objective
from racimo.worker.tune.propose_points import Points, is_of
from racimo.worker.tune.propose_standing import Standings

MAX_ASKS = 20
"""Samples for one point that may break a constraint or be there already; then it is left to chance."""
FIRST_SIGMA = 1.0 / 6.0
"""Of the unit cube's edge, as Optuna begins."""

_Told = tuple[tuple[int, tuple[float, float]], ...]
"""A generation: its trials with their standings."""


class CmaProposer:
    """Learns numbers that are always active; choices and conditional parameters are drawn at random."""

    def __init__(
        self,
        space: Space,
        objectives: Sequence[Objective],
        seed: int,
        *,
        limits: Sequence[str] = (),
        levels: Sequence[int] = (),
    ) -> None:
        self._space, self._seed = space, seed
        self._standings = Standings(objectives, limits, levels)
        self._axes = [
            name
            for name, one in space.parameters.items()
            if one.kind != "choice" and not one.when and one.num_values != 1
        ]
        self._points = Points()
        self._outcomes: dict[int, Outcome] = {}
        self._strategy = self._fresh()
        self._told: list[_Told] = []
        """Generations that the strategy has gone through."""

    def tell(self, results: Sequence[Outcome]) -> None:
        self._points.add(results)
        self._outcomes |= {one.number: one for one in results if is_of(self._space, one.values)}

    def forget(self, numbers: Collection[int]) -> None:
        self._points.remove(numbers)
        for number in numbers:
            self._outcomes.pop(number, None)

    def ask(self, count: int) -> list[Suggestion]:
        """Fewer than `count` where it finds nothing new in `MAX_ASKS`."""
        first = self._points.next_number
        self._go_through(self._generations())
        found: list[Suggestion] = []
        for number in range(first, first + count):
            beside = [one.values for one in found]
            values = next((v for t in range(MAX_ASKS) if self._fits(v := self._draw(number, t), beside)), None)
            if values is None:
                break
            found.append(Suggestion(values=values, by="cma-es" if self._told else "random"))
        return found

    def _fits(self, values: Values, beside: list[Values]) -> bool:
        return self._points.free(values, beside) and not self._space.broken_constraint(values)

    def _fresh(self) -> CMA:
        dimensions = max(1, len(self._axes))
        bounds = np.array([[0.0, 1.0]] * dimensions)
        return CMA(mean=np.full(dimensions, 0.5), sigma=FIRST_SIGMA, bounds=bounds, seed=self._seed % 2**32)

    def _generations(self) -> list[_Told]:
        if not self._axes:
            return []
        size = self._strategy.population_size
        known = [
            (number, standing)
            for number in sorted(self._outcomes)
            if (standing := self._standings.of(self._outcomes[number])) is not None
        ]
        return [tuple(known[at : at + size]) for at in range(0, len(known) - size + 1, size)]

    def _go_through(self, generations: list[_Told]) -> None:
        """From where it is if that is on the way there, else from the beginning."""
        if self._told != generations[: len(self._told)]:
            self._strategy, self._told = self._fresh(), []
        for generation in generations[len(self._told) :]:
            best_first = sorted(generation, key=lambda one: (one[1], one[0]))
            self._strategy.tell([(self._position(number), float(rank)) for rank, (number, _) in enumerate(best_first)])
            self._told.append(generation)
            if self._strategy.should_stop():  # it has converged, and would propose the same for ever
                self._strategy = self._fresh()

    def _position(self, number: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        values = self._outcomes[number].values
        found = [min(max(self._space.parameters[name].unit_of(values[name]), 0.0), 1.0) for name in self._axes]
        return np.array(found)

    def _draw(self, number: int, attempt: int) -> Values:
        learnt: dict[str, float] = {}
        if self._told:
            self._strategy.reseed_rng(int(uniform("propose", self._seed, number, attempt) * 2**32))
            learnt = dict(zip(self._axes, self._strategy.ask().tolist(), strict=False))
        return self._space.at(
            [
                min(learnt[name], 1.0 - 2.0**-53)
                if name in learnt
                else uniform("propose", self._seed, number, attempt, name)
                for name in self._space.parameters
            ]
        )
