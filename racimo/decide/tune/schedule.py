"""Which trial gets the next slice, and until when: one small class per scheduler, each a pure reading of a `Study`.

A scheduler is asked whenever a worker is free. It never sees a clock or a random source, and it keeps nothing: the same
study gives the same answer, so the decisions after a restart are those that would have been.
"""

import math
from collections.abc import Collection

from racimo.decide.tune.freeze_thaw import FreezeThaw
from racimo.decide.tune.moves import Begin, Clone, End, Go, Move, Scheduler, begins, ordinal, until_words
from racimo.decide.tune.population import Population, room
from racimo.state.nouns import Reason
from racimo.state.study import Study
from racimo.state.trials import Trial

__all__ = [
    "Begin", "Clone", "End", "Go", "Halving", "Median", "Move", "Scheduler", "Straight",
    "num_going_on", "num_new", "scheduler_of",
]  # fmt: skip

MIN_PEERS = 5
"""Trials that a median is taken of, at least."""


class Straight:
    """Every trial runs to its end."""

    def next(self, study: Study, taken: Collection[int]) -> Move | None:
        return Begin(until=study.terms.rounds, reason=begins(study.terms.rounds))

    def otherwise(self, study: Study, taken: Collection[int]) -> Go | End | None:
        return None


class Halving:
    """Asynchronous successive halving with pause and resume (Li et al. 2020, "A system for massively parallel
    hyperparameter tuning"): a free worker promotes the best of those that stand among the first 1/eta of their rung,
    the highest rung first, and begins a new trial only where nobody is to be promoted."""

    def next(self, study: Study, taken: Collection[int]) -> Move | None:
        return self._promotion(study, taken) or Begin(until=study.levels[0], reason=begins(study.levels[0]))

    def otherwise(self, study: Study, taken: Collection[int]) -> Go | End | None:
        return self._promotion(study, taken)

    def _promotion(self, study: Study, taken: Collection[int]) -> Go | None:
        for level in reversed(study.levels):
            rung = study.rungs.get(level)
            best = next((one for one in rung.waiting if one[1] not in taken), None) if rung is not None else None
            if rung is None or best is None or level == study.terms.rounds:
                continue
            value, number = best
            rank, among = rung.rank(best), len(rung.standings)
            if rank < among // study.terms.eta and math.isfinite(value):
                until = study.next_level(level)
                text = f"promoted: {ordinal(rank + 1)} of {among} after {level} rounds" + until_words(until)
                counts: dict[str, int | float] = {"rank": rank + 1, "among": among, "level": level, "until": until}
                return Go(trial=number, until=until, reason=Reason(code="promoted", text=text, counts=counts))
        return None


class Median:
    """A trial goes on round by round while its best value is not worse than the median of the others' averages so far
    (Golovin et al. 2017, "Google Vizier"), from `first_round` on and once there are five to compare with."""

    def next(self, study: Study, taken: Collection[int]) -> Move | None:
        return self.otherwise(study, taken) or Begin(
            until=study.terms.first_round, reason=begins(study.terms.first_round)
        )

    def otherwise(self, study: Study, taken: Collection[int]) -> Go | End | None:
        number = next((number for number in study.paused if number not in taken), None)
        return None if number is None else self._judge(study, study.trials[number])

    def _judge(self, study: Study, trial: Trial) -> Go | End:
        objective, rounds = study.objectives[0], trial.rounds
        mine = min((objective.signed(value) for _, value in trial.curve), default=math.inf)
        others = sorted(
            sum(objective.signed(value) for value in before) / len(before)
            for other in study.trials
            if other.number != trial.number and other.rounds >= rounds
            and (before := [value for at, value in other.curve if at <= rounds])
        )  # fmt: skip
        if len(others) >= MIN_PEERS and mine > (median := others[len(others) // 2]):
            shown = median if objective.minimize else -median
            text = f"stopped after {rounds} rounds: worse than the median of {len(others)} others, {shown:.4g}"
            counts: dict[str, int | float] = {"rounds": rounds, "others": len(others), "median": shown}
            return End(trial=trial.number, reason=Reason(code="below-median", text=text, counts=counts))
        text = f"goes on after {rounds} rounds"
        return Go(trial=trial.number, until=rounds + 1, reason=Reason(code="goes-on", text=text))


def num_new(study: Study) -> int:
    """How many new trials there may be now."""
    return room(study) if study.terms.scheduler == "population" else study.num_to_propose


def num_going_on(study: Study) -> int:
    """How many paused trials get another slice, whatever the others come to, as far as that is known."""
    return len(study.paused) if study.terms.scheduler in ("population", "median") else 0


def scheduler_of(study: Study, seed: int = 0) -> Scheduler:
    """The scheduler that the study's terms name. `seed`: the run's, for those that choose by a hash."""
    match study.terms.scheduler:
        case "asha":
            return Halving()
        case "median":
            return Median()
        case "none":
            return Straight()
        case "freeze-thaw":
            return FreezeThaw()
        case "population":
            return Population(seed)
        case other:
            raise AssertionError(other)
