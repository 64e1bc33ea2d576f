"""Freeze-thaw: every trial runs in short slices, and the paused one whose curve promises the most goes on next.

After Swersky et al. 2014, "Freeze-thaw Bayesian optimization", with two simplifications that keep it a pure reading of
the study: a curve is carried on as a power law through its newest half (Domhan et al. 2015 compare such families), and
how many trials go on from each length is fixed: a share that is the inverse of how much longer they get, so that each
length gets about the same time in all. Unlike in halving nobody waits for others of a whole rung, and a slice is never
more than half as long again as what the trial has had.
"""

import math
from collections import Counter
from collections.abc import Collection

from racimo.decide.tune.moves import Begin, Go, Move, begins, ordinal, until_words
from racimo.state.nouns import Reason
from racimo.state.study import Standing, Study
from racimo.state.trials import Trial

MAX_CANDIDATES = 24
"""Of one length, the best by value: among them the most promising one is looked for."""
TRUST = 0.5
"""How much of the fall that its power law promises a curve is credited with."""
HORIZON = 3
"""Where it is not known when trials are complete, curves are carried on to so many times the longest."""


class FreezeThaw:
    def next(self, study: Study, taken: Collection[int]) -> Move | None:
        return self._thaw(study, taken) or Begin(until=study.levels[0], reason=begins(study.levels[0]))

    def otherwise(self, study: Study, taken: Collection[int]) -> Go | None:
        return self._thaw(study, taken) or self._deepen(study, taken)

    def _thaw(self, study: Study, taken: Collection[int]) -> Go | None:
        under_way = Counter(
            trial.grant.until for number in study.running.values() if (trial := study.trials[number]).grant is not None
        )
        for level in reversed(study.levels):
            rung = study.rungs.get(level)
            if rung is None or not rung.waiting or level == study.terms.rounds:
                continue
            until = study.next_level(level)
            above = study.rungs.get(until)
            went = (len(above.standings) if above is not None else 0) + under_way[until]
            went += sum(study.trials[number].rounds == level for number in taken)
            among = len(rung.standings)
            quota = among * level // until if until else 1
            if went >= quota:
                continue
            best = self._most_promising(study, [one for one in rung.waiting if rung.rank(one) < 2 * quota], taken)
            if best is not None:
                return self._go(study, best, rung.rank(_standing(study, best)), among, level, until)
        return None

    def _deepen(self, study: Study, taken: Collection[int]) -> Go | None:
        """Nothing else is left to do: the most promising trial of the longest goes on, until one is complete."""
        if study.running or taken or study.counts.get("finished"):
            return None
        for level in reversed(study.levels):
            rung = study.rungs.get(level)
            best = self._most_promising(study, rung.waiting, taken) if rung is not None else None
            if rung is not None and best is not None and level != study.terms.rounds:
                rank = rung.rank(_standing(study, best))
                return self._go(study, best, rank, len(rung.standings), level, study.next_level(level))
        return None

    def _most_promising(self, study: Study, waiting: list[Standing], taken: Collection[int]) -> Trial | None:
        found = [
            study.trials[number]
            for value, number in waiting[:MAX_CANDIDATES]
            if number not in taken and math.isfinite(value)
        ]
        horizon = study.terms.rounds or HORIZON * max(study.rungs, default=1)
        return min(found, key=lambda trial: (predicted(study, trial, horizon), trial.number), default=None)

    def _go(self, study: Study, trial: Trial, rank: int, among: int, level: int, until: int) -> Go:
        objective = study.objectives[0]
        horizon = study.terms.rounds or HORIZON * max(study.rungs, default=1)
        promise = predicted(study, trial, horizon)
        shown = promise if objective.minimize else -promise
        text = f"thaws: {ordinal(rank + 1)} of {among} after {level} rounds, on its way to {shown:.4g}"
        counts: dict[str, int | float] = {"rank": rank + 1, "among": among, "level": level, "until": until}
        reason = Reason(code="thaws", text=text + until_words(until), counts={**counts, "predicted": shown})
        return Go(trial=trial.number, until=until, reason=reason)


def predicted(study: Study, trial: Trial, horizon: int) -> float:
    """The value (less is better) that the trial is on its way to after `horizon` rounds.

    A curve that falls as 1/rounds loses from `now` to the horizon as much, relative to what it lost since `half`, as
    these three lie apart in 1/rounds. One with a single point is taken as it is."""
    objective = study.objectives[0]
    points = [(rounds, objective.signed(value)) for rounds, value in trial.curve]
    if not points:
        return math.inf
    now, value = points[-1]
    half, before = next((p for p in reversed(points[:-1]) if 2 * p[0] <= now), points[0])
    if half >= now or now >= horizon:
        return value
    lost = max(0.0, before - value)
    return value - TRUST * lost * (1 / now - 1 / horizon) / (1 / half - 1 / now)


def _standing(study: Study, trial: Trial) -> Standing:
    return study.signed(trial), trial.number
