"""A Gaussian process as a proposer: it learns from all rounds of all trials at once, and proposes what is expected to
improve most on the best, were it trained to the end.

A result after few rounds counts for what it says of the end, by the model's own account (see `gaussian`), so that
paused trials teach as much as they can. What runs is taken to end as expected, so that workers do not all try the same.
All of it follows from the trials that are known, the seed and the trial's number: any process gives the same points.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from racimo.decide.tune.draw import uniform
from racimo.spec.proposer import Outcome, Suggestion, Values
from racimo.spec.space import Space
from racimo.spec.study import Objective
from racimo.worker.tune.gaussian import Settings, Surrogate, fitted, log_improvement
from racimo.worker.tune.propose_cube import BELOW_ONE, Cube
from racimo.worker.tune.propose_points import Points, is_of
from racimo.worker.tune.propose_standing import Standings

Array = NDArray[np.float64]

FEW = 8
"""Values before which a model would learn nothing: points are random."""
MOST_SEEN = 160
"""Values that the model is given: its time grows with their number's third power. One half are the best."""
MOST_FITTED = 60
"""Values by which the kernel's numbers are found, and in how many steps."""
FIT_STEPS = 10
NUM_ANYWHERE, NUM_NEAR, NUM_NEARER, NUM_TURNS = 80, 120, 40, 3
"""Candidates: anywhere, near the best points that are known, then near the best candidates, several times over."""
NUM_BEST = 10
NUM_LEADING = 5
STEPS = (0.4, 0.15, 0.05, 0.015)
"""How far candidates are from what they are near to, as parts of an axis."""
PARTS = (0.2, 0.5, 1.0)
"""How many axes change."""
MAX_TRIES = 40
"""Candidates that may be there already or break a constraint, for one point; then it is left to chance."""


class GaussianProposer:
    """For one objective. `rounds`: after how many a trial is complete, 0 if that is not known."""

    def __init__(
        self,
        space: Space,
        objectives: Sequence[Objective],
        seed: int,
        *,
        limits: Sequence[str] = (),
        rounds: int = 0,
    ) -> None:
        self._space, self._seed, self._rounds = space, seed, rounds
        self._objective = objectives[0]
        self._standings = Standings(objectives, limits)
        self._cube = Cube(space)
        self._settings = Settings(max(1, self._cube.num_features))
        self._points = Points()
        self._outcomes: dict[int, Outcome] = {}
        self._positions: dict[int, Array] = {}

    def tell(self, results: Sequence[Outcome]) -> None:
        self._points.add(results)
        for outcome in results:
            if is_of(self._space, outcome.values):
                self._outcomes[outcome.number] = outcome
                if outcome.number not in self._positions:
                    self._positions[outcome.number] = self._cube.position_of(outcome.values)

    def forget(self, numbers: Collection[int]) -> None:
        self._points.remove(numbers)
        for number in numbers:
            self._outcomes.pop(number, None)
            self._positions.pop(number, None)

    def ask(self, count: int) -> list[Suggestion]:
        """Fewer than `count` where it finds nothing usable in `MAX_TRIES`."""
        first = self._points.next_number
        model = self._model()
        found: list[Suggestion] = []
        for number in range(first, first + count):
            suggestion = self._one(number, model, [one.values for one in found])
            if suggestion is None:
                break
            found.append(suggestion)
            if model is not None and len(found) < count:
                model.take(self._cube.position_of(suggestion.values))
        return found

    def _one(self, number: int, model: "_Model | None", beside: list[Values]) -> Suggestion | None:
        source = np.random.default_rng(int(uniform("propose", self._seed, number) * 2**53))
        if model is None:
            positions, by = source.random((MAX_TRIES, len(self._space.parameters))), "random"
        else:
            positions, by = model.candidates(source), "gp"
        for position in positions[:MAX_TRIES]:
            values = self._cube.values_at(position)
            if self._points.free(values, beside) and not self._space.broken_constraint(values):
                return Suggestion(values=values, by=by)
        return None

    # What is learnt from

    def _model(self) -> "_Model | None":
        numbers, rounds, values = self._seen()
        if len(values) < FEW or not np.isfinite(values).any():
            return None
        levelled = standardised(values)
        kept = _best_and_newest(levelled, MOST_SEEN)
        numbers, rounds, levelled = numbers[kept], rounds[kept], levelled[kept]
        positions = np.stack([self._positions[number] for number in numbers.tolist()])
        last = max(self._rounds, int(rounds.max()))
        progress = np.log(rounds) / math.log(last) if last > 1 else np.ones(len(rounds))
        features = self._cube.features(positions)
        few = _best_and_newest(levelled, MOST_FITTED)
        theta = fitted(self._settings, features[few], progress[few], levelled[few], FIT_STEPS)
        surrogate = Surrogate(theta, self._settings.num_axes, features, progress, levelled)
        pending = [
            self._positions[number]
            for number in sorted(self._outcomes)
            if self._outcomes[number].status in ("waiting", "running")
        ]
        return _Model(self._cube, surrogate, positions, pending)

    def _seen(self) -> tuple[NDArray[np.int64], Array, Array]:
        """Trial, rounds and value (less is better, infinity where it diverged) of all that is known, by number."""
        rows: list[tuple[int, int, float]] = []
        for number in sorted(self._outcomes):
            outcome = self._outcomes[number]
            if outcome.status == "failed" or not outcome.rounds:
                continue
            if self._standings.violates(outcome) or outcome.status == "diverged":
                rows.append((number, outcome.rounds, math.inf))
                continue
            curve = dict(outcome.curve)
            if outcome.rounds not in curve and self._objective.metric in outcome.metrics:
                curve[outcome.rounds] = outcome.metrics[self._objective.metric]
            rows += [(number, rounds, self._objective.signed(value)) for rounds, value in sorted(curve.items())]
        numbers = np.array([row[0] for row in rows], dtype=np.int64)
        return numbers, np.array([float(row[1]) for row in rows]), np.array([row[2] for row in rows])


class _Model:
    """The surrogate, and what is looked for with it."""

    def __init__(self, cube: Cube, surrogate: Surrogate, positions: Array, pending: list[Array]) -> None:
        self._cube, self._surrogate = cube, surrogate
        expected, _ = surrogate.at_end(surrogate.points)
        order = np.argsort(expected, kind="stable")
        self._best = float(expected[order[0]])
        self._best_positions = np.unique(positions[order[: 3 * NUM_BEST]], axis=0)[:NUM_BEST]
        if pending:
            surrogate.believe(cube.features(np.stack(pending)))

    def take(self, position: Array) -> None:
        """This point is tried, too."""
        self._surrogate.believe(self._cube.features(position[None, :]))

    def candidates(self, source: np.random.Generator) -> Array:
        """Positions, the most promising first."""
        positions = np.vstack(
            [source.random((NUM_ANYWHERE, len(self._cube.free))), self._near(source, self._best_positions, NUM_NEAR)]
        )
        worth = self._worth(positions)
        for _ in range(NUM_TURNS):
            leading = positions[np.argsort(-worth, kind="stable")[:NUM_LEADING]]
            nearer = self._near(source, leading, NUM_NEARER)
            positions, worth = np.vstack([positions, nearer]), np.concatenate([worth, self._worth(nearer)])
        found: Array = positions[np.argsort(-worth, kind="stable")]
        return found

    def _worth(self, positions: Array) -> Array:
        return log_improvement(*self._surrogate.at_end(self._cube.features(positions)), self._best)

    def _near(self, source: np.random.Generator, centres: Array, count: int) -> Array:
        """Near some of `centres` along some axes; what would leave the cube ends at its edge: optima often do."""
        chosen = centres[source.integers(0, len(centres), count)]
        step = source.choice(STEPS, size=(count, 1)) * source.normal(size=chosen.shape)
        changed = source.random(chosen.shape) < source.choice(PARTS, size=(count, 1))
        moved = chosen + np.where(changed & self._cube.ordered, step, 0.0)
        moved = np.where(changed & ~self._cube.ordered, source.random(chosen.shape), moved)
        found: Array = np.clip(moved, 0.0, BELOW_ONE)
        return found


def standardised(values: Array) -> Array:
    """With mean 0 and deviation 1; the bad end, infinity too, is cut off as far from the median as the best is, since
    how bad a bad point is says nothing of where the good ones are."""
    finite = values[np.isfinite(values)]
    best, median = float(finite.min()), float(np.median(finite))
    cut = np.minimum(values, 2.0 * median - best)
    found: Array = (cut - cut.mean()) / (cut.std() + 1e-12)
    return found


def _best_and_newest(values: Array, most: int) -> NDArray[np.int64]:
    """Positions of at most so many: the best half, and the newest of the others."""
    if len(values) <= most:
        return np.arange(len(values))
    order = np.argsort(values, kind="stable")
    rest = np.sort(order[most // 2 :])
    return np.sort(np.concatenate([order[: most // 2], rest[len(rest) - (most - most // 2) :]]))
