"""Population based training (Jaderberg et al. 2017): members train side by side; the worst quarter gives up, and in its
place a member of the best quarter goes on at a changed point.

A clone is a new trial with a parent, so every trial has one point from beginning to end. Only who has a saved state can
be a parent, and no state is taken away while its study is open, so a clone never reads one that is not there
(ray#9036, ray#27170).
"""

import math
from collections.abc import Collection

from racimo.decide.tune.draw import uniform
from racimo.decide.tune.moves import Begin, Clone, End, Go, Move, begins, ordinal, until_words
from racimo.spec.space import Parameter, Scalar, Space, Values
from racimo.state.nouns import Reason
from racimo.state.study import Study
from racimo.state.trials import Trial

DEFAULT_SIZE = 10
"""Members, where the study does not say how many trials run at a time."""
MIN_TOLD = 4
"""Members that have told a value, before any is compared."""
QUARTER = 4
RESAMPLED = 0.25
"""The chance that a parameter of a clone is drawn anew; else a number is multiplied by one of `FACTORS`."""
FACTORS = (0.8, 1.25)
MAX_TRIES = 100
"""Points looked at for a clone before it is given its parent's own."""


class Population:
    """`seed`: chooses, with what is compared, who is copied and how it is changed."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def next(self, study: Study, taken: Collection[int]) -> Move | None:
        move = self.otherwise(study, taken)
        if move is not None:
            return move
        interval = study.terms.first_round
        more = room(study)
        drawn = any(number not in taken for number in study.waiting)
        return Begin(until=interval, reason=begins(interval), most=more) if more or drawn else None

    def otherwise(self, study: Study, taken: Collection[int]) -> Go | End | Clone | None:
        return self._begin_clone(study, taken) or self._refill(study) or self._go_on(study, taken)

    def _begin_clone(self, study: Study, taken: Collection[int]) -> Go | None:
        """Clones that are there and have not begun."""
        for number in study.waiting:
            trial = study.trials[number]
            if trial.parent is not None and trial.grant is None and number not in taken:
                until = self._until(study, study.trials[trial.parent].saved)
                text = f"begins with what trial {trial.parent} has saved" + until_words(until)
                return Go(trial=number, until=until, reason=Reason(code="begins", text=text))
        return None

    def _refill(self, study: Study) -> Clone | None:
        """Somebody gave up or failed: a copy of one of the best comes in its place."""
        size = _size(study)
        drawn = sum(trial.parent is None for trial in study.trials[:size])
        if drawn < size or not study.num_to_propose or _num_members(study) >= size:
            return None
        parent = self._parent(study, len(study.trials))
        if parent is None:
            return None
        values = explore(study.space, parent.values, self._seed, len(study.trials))
        reason = Reason(code="clones", text=f"trial {parent.number} is among the best and is copied")
        return Clone(parent=parent.number, values=values, reason=reason)

    def _go_on(self, study: Study, taken: Collection[int]) -> Go | End | None:
        """Of the paused the one with the fewest rounds."""
        paused = [study.trials[number] for number in study.paused if number not in taken]
        trial = min(paused, key=lambda one: (one.rounds, one.number), default=None)
        if trial is None:
            return None
        ranked = _ranked(study)
        rank = next((at for at, other in enumerate(ranked) if other.number == trial.number), len(ranked))
        if len(ranked) >= MIN_TOLD and rank >= len(ranked) - len(ranked) // QUARTER and study.num_to_propose:
            parent = self._parent(study, trial.number)
            if parent is not None and parent.number != trial.number:
                text = f"gives up after {trial.rounds} rounds: {ordinal(rank + 1)} of {len(ranked)}"
                counts: dict[str, int | float] = {"rank": rank + 1, "among": len(ranked), "rounds": trial.rounds}
                return End(trial=trial.number, reason=Reason(code="worst-quarter", text=text, counts=counts))
        until = self._until(study, trial.rounds)
        text = f"goes on after {trial.rounds} rounds" + until_words(until)
        return Go(trial=trial.number, until=until, reason=Reason(code="goes-on", text=text))

    def _until(self, study: Study, rounds: int) -> int:
        until = rounds + study.terms.first_round
        return min(until, study.terms.rounds) if study.terms.rounds else until

    def _parent(self, study: Study, for_trial: int) -> Trial | None:
        """One of the best quarter that has something saved and is not complete, by a hash."""
        ranked = _ranked(study)
        best = [one for one in ranked[: max(1, len(ranked) // QUARTER)] if one.saved and not _complete(study, one)]
        if len(ranked) < MIN_TOLD - 1 or not best:  # whoever gave its place up is not among them any more
            return None
        return best[int(uniform("exploit", self._seed, for_trial, study.num_slices) * len(best))]


def explore(space: Space, values: Values, seed: int, number: int) -> Values:
    """A point near another one, by a hash of the new trial's number."""
    for attempt in range(MAX_TRIES):
        found: Values = {}
        for name, parameter in space.parameters.items():
            if space.active(name, found):
                chance, draw = (uniform("explore", seed, number, attempt, name, what) for what in ("chance", "draw"))
                known = name in values and chance >= RESAMPLED
                found[name] = _near(parameter, values[name], draw) if known else parameter.at(draw)
        if found != values and not space.broken_constraint(found):
            return found
    return values


def _near(parameter: Parameter, value: Scalar, draw: float) -> Scalar:
    if parameter.kind == "choice":
        return value
    assert isinstance(value, int | float)
    changed = value * FACTORS[draw >= 0.5]
    if parameter.kind == "int" or parameter.step:
        step = parameter.step or 1.0
        steps = round((changed - parameter.low) / step)
        if parameter.low + steps * step == value:  # too small a number to be changed by a factor
            steps += 1 if draw >= 0.5 else -1
        changed = parameter.low + steps * step
    inside = min(max(changed, parameter.low), parameter.high)
    if parameter.step and parameter.num_values is not None:
        inside = min(inside, parameter.low + (parameter.num_values - 1) * parameter.step)
    return int(inside) if parameter.kind == "int" else inside


def room(study: Study) -> int:
    """How many trials the population may still take in."""
    return max(0, min(_size(study) - _num_members(study), study.num_to_propose))


def _size(study: Study) -> int:
    return min(study.terms.parallel or DEFAULT_SIZE, study.terms.trials)


def _num_members(study: Study) -> int:
    """Trials that live, and those that have come to their end: their places are not given away."""
    counts = study.counts
    return sum(counts.get(status, 0) for status in ("waiting", "running", "paused", "finished"))


def _ranked(study: Study) -> list[Trial]:
    """Members that have told a value, the best first."""
    members = {
        *study.waiting, *study.running.values(), *study.paused,
        *(trial.number for trial in study.trials if trial.status == "finished"),
    }  # fmt: skip
    found = [study.trials[number] for number in members if math.isfinite(study.signed(study.trials[number]))]
    return sorted(found, key=lambda trial: (study.signed(trial), trial.number))


def _complete(study: Study, trial: Trial) -> bool:
    return trial.status == "finished" or (bool(study.terms.rounds) and trial.saved >= study.terms.rounds)
