"""Optuna's samplers as proposers: TPE, Gaussian process, NSGA-II.

Each point is sampled by a fresh sampler, whose seed follows from the study's seed and the trial's number, out of the
trials that are known: the same history gives the same points, whatever process gives them. Optuna's storages, pruners
and `optimize` have no part in it; its trials are made anew from what was told, so a paused one may change.

What diverged counts as the worst there is (ray#6659), so that the search leaves where that happens. What runs for the
first time counts as bad until it is known (`constant_liar`), so that workers do not all try the same.
"""

import copy
import math
import warnings
from collections.abc import Collection, Container, Sequence
from datetime import datetime
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, TPESampler
from optuna.samplers.nsgaii import PolynomialMutation, SBXCrossover
from optuna.storages import InMemoryStorage
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from racimo.decide.tune.draw import uniform
from racimo.spec.proposer import Outcome, Suggestion, Values
from racimo.spec.space import Parameter, Scalar, Space, identity
from racimo.spec.study import Objective
from racimo.worker.tune.propose_points import Points, is_of
from racimo.worker.tune.propose_standing import Standings, scores

MAX_ASKS = {"tpe": 20, "gp": 5, "nsga-ii": 20}
"""Samples for one point that may break a constraint or be there already; then it is left to chance."""
FEW = 10
"""Results before which a model would learn nothing: points are random."""
GP_NEWEST, GP_BEST = 150, 100
"""Trials that a Gaussian process learns from: its time grows with their number's third power."""
GENETIC_MOST, GENETIC_PART = 50, 3
"""Parents are the best of what is known, one of so many, and at most so many."""
MUTATION_ETA = 5.0
"""The larger, the nearer to its parent: a tenth of the range on average."""
_STUDY = "racimo"
_SOMETIME = datetime(2000, 1, 1)
"""Optuna wants times of trials, and learns nothing from them."""


class OptunaProposer:
    """`name`: tpe, gp or nsga-ii. `limits`: conditions on metrics, as in the study. `levels`: see `Standings`."""

    def __init__(
        self,
        space: Space,
        objectives: Sequence[Objective],
        seed: int,
        *,
        name: str,
        limits: Sequence[str] = (),
        levels: Sequence[int] = (),
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space, self._seed, self._name = space, seed, name
        self._standings = Standings(objectives, limits, levels)
        self._limited = bool(limits)
        self._axes = {name: distribution_of(parameter) for name, parameter in space.parameters.items()}
        self._groups = groups_of(space)
        self._points = Points()
        self._outcomes: dict[int, Outcome] = {}
        self._trials: dict[int, FrozenTrial] = {}
        """Those that say something."""
        self._storage = _Shown()
        self._storage.create_new_study([StudyDirection.MINIMIZE] * len(objectives), _STUDY)

    # The interface

    def tell(self, results: Sequence[Outcome]) -> None:
        self._points.add(results)
        for outcome in results:
            self._outcomes[outcome.number] = outcome
            trial = self._trial_of(outcome)
            if trial is not None:
                self._trials[outcome.number] = trial
            else:
                self._trials.pop(outcome.number, None)

    def forget(self, numbers: Collection[int]) -> None:
        self._points.remove(numbers)
        for number in numbers:
            self._outcomes.pop(number, None)
            self._trials.pop(number, None)

    def ask(self, count: int) -> list[Suggestion]:
        """Fewer than `count` where the sampler finds nothing usable in `MAX_ASKS`."""
        first, known = self._points.next_number, self._known()
        found: list[Suggestion] = []
        for number in range(first, first + count):
            proposal = self._one(number, known, [one.values for one in found])
            if proposal is None:
                break
            found.append(proposal)
            known.append(self._frozen(number, proposal.values, TrialState.RUNNING))
        return found

    # Within

    def _one(self, number: int, known: list[FrozenTrial], beside: list[Values]) -> Suggestion | None:
        """What cannot be used counts as bad in the samples after it: a model would insist on it otherwise."""
        known = list(known)
        for attempt in range(MAX_ASKS[self._name]):
            values, learnt = self._sample(number, attempt, known)
            if self._points.free(values, beside) and not self._space.broken_constraint(values):
                return Suggestion(values=values, by=self._name if learnt else "random")
            known.append(self._as_worst(number, values, known))
        return None

    def _as_worst(self, number: int, values: Values, known: list[FrozenTrial]) -> FrozenTrial:
        if self._name == "tpe" and len(self._standings.objectives) == 1:
            return self._frozen(number, values, TrialState.PRUNED, reached=(0, math.inf))
        results = [one.values for one in known if one.state == TrialState.COMPLETE]
        worst = [max(column) for column in zip(*results, strict=True)]
        return self._frozen(number, values, TrialState.COMPLETE if worst else TrialState.RUNNING, worst or None)

    def _sample(self, number: int, attempt: int, known: list[FrozenTrial]) -> tuple[Values, bool]:
        """A point, and whether a model had a part in it."""
        sampler = self._sampler(int(uniform("propose", self._seed, number, attempt) * 2**32))
        trial = self._frozen(number, {}, TrialState.RUNNING)
        values: Values = {}
        learnt = False
        for group in self._groups:
            if not self._space.active(group[0], values):
                continue
            axes = {name: axis for name in group if (axis := self._axes[name]) is not None}
            self._storage.shown = known
            if len(self._groups) > 1:
                self._storage.shown = [one for one in known if axes.keys() <= one.params.keys()]
            found: dict[str, Any] = {}
            if axes and sum(one.state != TrialState.RUNNING for one in self._storage.shown) >= FEW:
                study = optuna.load_study(
                    study_name=_STUDY, storage=self._storage, sampler=sampler, pruner=optuna.pruners.NopPruner()
                )
                found = sampler.sample_relative(study, trial, axes)
            learnt = learnt or bool(found)
            for name in group:
                parameter = self._space.parameters[name]
                if name in found:
                    values[name] = from_optuna(parameter, found[name])
                else:
                    values[name] = parameter.at(uniform("propose", self._seed, number, attempt, name))
        return values, learnt

    def _sampler(self, seed: int) -> BaseSampler:
        if self._name == "tpe":
            return TPESampler(seed=seed, n_startup_trials=1, multivariate=True, constant_liar=True)
        if self._name == "gp":
            return GPSampler(seed=seed, n_startup_trials=1, warn_independent_sampling=False)
        num_parents = min(max(2, len(self._trials) // GENETIC_PART), GENETIC_MOST)
        with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
            return _Genetic(
                seed=seed,
                population_size=num_parents,
                crossover=SBXCrossover(),
                mutation=PolynomialMutation(eta=MUTATION_ETA),
            )

    def _known(self) -> list[FrozenTrial]:
        """All trials that say something, by number."""
        trials = [self._trials[number] for number in sorted(self._trials)]
        if self._name == "tpe" or len(self._standings.objectives) > 1:
            return trials if self._name != "gp" else trials[-GP_NEWEST - GP_BEST :]
        standings = {
            trial.number: standing
            for trial in trials
            if (standing := self._standings.of(self._outcomes[trial.number])) is not None
        }
        score = scores(standings)
        shown = set(score)
        if self._name == "gp":
            shown = set(sorted(score)[-GP_NEWEST:]) | set(sorted(score, key=score.__getitem__)[:GP_BEST])
        return [
            _with_score(trial, score[trial.number]) if trial.number in score else trial
            for trial in trials
            if trial.number in shown or trial.state == TrialState.RUNNING
        ]

    def _trial_of(self, outcome: Outcome) -> FrozenTrial | None:
        """As Optuna learns from it; None if it says nothing, or is of another space."""
        if not is_of(self._space, outcome.values):
            return None
        if self._standings.pending(outcome):
            return self._frozen(outcome.number, outcome.values, TrialState.RUNNING)
        standing = self._standings.of(outcome)
        if standing is None:
            return None
        signed = self._standings.signed(outcome)
        if len(signed) > 1:  # Optuna has no pruned trials of several objectives, and no infinite ones
            whole = all(math.isfinite(value) for value in signed)
            return self._frozen(outcome.number, outcome.values, TrialState.COMPLETE, signed) if whole else None
        kind, value = standing
        if kind == -math.inf:
            return self._frozen(outcome.number, outcome.values, TrialState.COMPLETE, signed)
        return self._frozen(outcome.number, outcome.values, TrialState.PRUNED, reached=(max(0, -int(kind)), value))

    def _frozen(
        self,
        number: int,
        values: Values,
        state: TrialState,
        signed: Sequence[float] | None = None,
        reached: tuple[int, float] | None = None,
    ) -> FrozenTrial:
        params, axes = {}, {}
        for name, value in values.items():
            axis = self._axes.get(name)
            if axis is not None:
                params[name], axes[name] = to_optuna(self._space.parameters[name], value), axis
        constraints = None
        if self._limited and state != TrialState.RUNNING:
            outcome = self._outcomes.get(number)
            broken = outcome is None or outcome.status == "diverged" or self._standings.violates(outcome)
            constraints = {"limits": 1.0 if broken else -1.0}
        trial = create_trial(
            state=state,
            values=signed,
            params=params,
            distributions=axes,
            constraints=constraints,
            intermediate_values=dict([reached]) if reached is not None else {},
        )
        trial.number, trial._trial_id = number, number
        return trial


class _Shown(InMemoryStorage):
    """Shows samplers the trials that they are to learn from, and keeps nothing of what they note down."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[FrozenTrial] = []

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        return [trial for trial in self.shown if states is None or trial.state in states]

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        pass

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        pass


class _Genetic(NSGAIISampler):
    """NSGA-II without generations: parents are the best of all trials that are known, at any time. A worker then never
    waits for the rest of a generation, and which trials are parents follows from the history alone."""

    def get_trial_generation(self, study: Study, trial: FrozenTrial) -> int:
        return 1

    def get_population(self, study: Study, generation: int) -> list[FrozenTrial]:
        return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def _with_score(trial: FrozenTrial, score: float) -> FrozenTrial:
    scored = copy.copy(trial)
    scored.state, scored.intermediate_values, scored.values = TrialState.COMPLETE, {}, [score]
    return scored


def groups_of(space: Space) -> list[list[str]]:
    """Parameters that are active together, each group after those that its condition names: sampled jointly."""
    groups: dict[str, list[str]] = {}
    for name, parameter in space.parameters.items():
        when = sorted((other, sorted(map(repr, map(identity, allowed)))) for other, allowed in parameter.when.items())
        groups.setdefault(repr(when), []).append(name)
    return list(groups.values())


def distribution_of(parameter: Parameter) -> BaseDistribution | None:
    """None where there is only one value. Choices go by their position: to Optuna `1` and `true` are the same."""
    count = parameter.num_values
    if count == 1:
        return None
    if parameter.kind == "choice":
        return CategoricalDistribution(tuple(range(len(parameter.choices))))
    high = parameter.high
    if parameter.step and count is not None:
        high = parameter.low + (count - 1) * parameter.step
    if parameter.kind == "int":
        return IntDistribution(int(parameter.low), int(high), log=parameter.log, step=int(parameter.step) or 1)
    return FloatDistribution(parameter.low, high, log=parameter.log, step=parameter.step or None)


def to_optuna(parameter: Parameter, value: Scalar) -> Any:
    if parameter.kind == "choice":
        return int(parameter.unit_of(value) * len(parameter.choices))
    return value


def from_optuna(parameter: Parameter, value: Any) -> Scalar:
    if parameter.kind == "choice":
        return parameter.choices[int(value)]
    if parameter.kind == "int":
        return int(value)
    return min(max(float(value), parameter.low), parameter.high)
