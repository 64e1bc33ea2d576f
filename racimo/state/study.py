"""A tune run's trials, and the tables over them that a decision reads: what waits, what runs, who stands where.

`Study.apply` is the fold's part for these events. Only the terms, the trials and a few sums are kept in snapshots; all
else follows from them, so that a decision after a restart finds what it would have found without.
"""

import math
from bisect import insort
from typing import assert_never

import msgspec
from msgspec.structs import replace

from racimo.spec.expression import Expression
from racimo.spec.space import Scalar, key_of
from racimo.spec.study import StudySpec
from racimo.state import events as ev
from racimo.state.nouns import Failure, Reason
from racimo.state.rungs import Rung, Standing, joined, levels, remove
from racimo.state.trials import Grant, Result, Trial, TrialStatus

__all__ = ["Bill", "Kept", "Rung", "Standing", "Study", "StudyEvent", "joined", "levels"]

StudyEvent = (
    ev.TrialsProposed | ev.SliceGranted | ev.SliceEnded | ev.TrialEnded | ev.StudyChanged
)  # fmt: skip


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker of a slice is: where it runs, on how many devices, and what one costs an hour."""

    node: str = ""
    num_devices: float = 1.0
    price_per_device_hour: float = 0.0

    def cost(self, worked_s: float) -> float:
        return worked_s * self.num_devices / 3600.0 * self.price_per_device_hour


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot holds of a study."""

    terms: StudySpec
    trials: list[Trial]
    num_slices: int = 0
    num_draws: int = 0
    waiting: tuple[int, ...] = ()
    exhausted: bool = False
    failure: Failure | None = None
    failed_in_a_row: int = 0
    last_ended: int | None = None


class Study:
    """Values are frozen, the tables change in place; only the fold changes them."""

    def __init__(self, terms: StudySpec) -> None:
        self.trials: list[Trial] = []
        """By number."""
        self.num_slices = 0
        self.num_draws = 0
        """Draws of the proposers that the decision computes itself; no draw is made twice."""
        self.waiting: dict[int, None] = {}
        """Trials to be begun or gone on with as soon as a worker is free, in that order."""
        self.running: dict[int, int] = {}
        """Worker index to the trial that it runs."""
        self.paused: dict[int, None] = {}
        """Trials between two slices, until the scheduler lets them go on."""
        self.counts: dict[TrialStatus, int] = {}
        self.rungs: dict[int, Rung] = {}
        """By rounds, those that some trial has reached."""
        self.ranking: list[Standing] = []
        """All trials that told the first objective and meet the limits, by their newest value."""
        self.points: dict[object, int] = {}
        """Key of a point to the first trial that has it."""
        self.device_s = 0.0
        self.num_rounds = 0
        """Of all trials."""
        self.cost = 0.0
        self.prepaid_s = 0.0
        """Device-seconds that slices now running may still cost."""
        self.exhausted = False
        """The proposer has no further point."""
        self.failure: Failure | None = None
        """How the proposer failed."""
        self.failed_in_a_row = 0
        """Trials that failed since the last that told a metric."""
        self.last_ended: int | None = None
        """The trial whose slice ended last."""
        self.changed_at = -1
        """Of the newest record about it, its number; not in snapshots."""
        self._changes: dict[int, int] = {}
        """By trial, the number of the newest record about it; the newest last."""
        self._take_terms(terms)

    def _take_terms(self, terms: StudySpec) -> None:
        self.terms = terms
        self.space = terms.parsed_space
        self.objectives = terms.objectives
        self.first_points = terms.first_points
        self.levels = levels(terms)
        self._limits = [Expression(limit, None) for limit in terms.limits]

    # What a decision reads

    @property
    def best(self) -> Trial | None:
        return self.trials[self.ranking[0][1]] if self.ranking else None

    @property
    def num_to_propose(self) -> int:
        """Trials that there may still be."""
        return 0 if self.exhausted else max(0, self.terms.trials - len(self.trials))

    def known(self, values: dict[str, Scalar]) -> int | None:
        """The trial that has this point already."""
        return self.points.get(key_of(values))

    def signed(self, trial: Trial) -> float:
        """Its newest value of the first objective, less being better; infinity without one."""
        objective = self.objectives[0]
        return objective.signed(trial.metrics.get(objective.metric, math.nan))

    def meets_limits(self, trial: Trial) -> bool:
        """A limit on a metric that the trial has not told is not met."""
        return all(limit.names <= trial.metrics.keys() and limit.holds(trial.metrics) for limit in self._limits)

    def changed_since(self, seq: int) -> list[Trial]:
        """Trials that changed after record `seq` (-1: all), as far as is known in this process's life."""
        if seq < 0:
            return list(self.trials)
        found: list[int] = []
        for number, at in reversed(self._changes.items()):
            if at <= seq:
                break
            found.append(number)
        return [self.trials[number] for number in sorted(found)]

    def next_level(self, rounds: int) -> int:
        """The first rung above so many rounds; 0 if there is none, and the trial goes on to its end."""
        above = [level for level in self.levels if level > rounds]
        return above[0] if above else 0

    def grant_of(self, worker: int) -> Grant | None:
        """The slice that a worker runs."""
        number = self.running.get(worker)
        return self.trials[number].grant if number is not None else None

    # The fold

    def apply(self, event: StudyEvent, seq: int, at_s: float, bill: Bill | None = None) -> None:
        """Lets one event happen, in place. `bill`: of the worker whose slice ended."""
        self.changed_at = seq
        match event:
            case ev.TrialsProposed():
                self._propose(event)
            case ev.SliceGranted():
                self._grant(event.grant, at_s)
            case ev.SliceEnded():
                grant = self.grant_of(event.index)
                if grant is not None and grant.number == event.number:
                    self._end_slice(grant, event.result, at_s, bill or Bill())
            case ev.TrialEnded():
                trial = self.trials[event.trial]
                if not trial.over and trial.status != "running":
                    self._put(replace(trial, status=event.status, reason=event.reason, ended_at_s=at_s))
            case ev.StudyChanged():
                self._change_terms(event.study)
            case _:
                assert_never(event)

    def lose(self, worker: int, seq: int, at_s: float, bill: Bill, *, asked: bool = False) -> None:
        """A worker ended. The slice that it ran is lost, and the trial goes on from what it had saved. `asked`: it had
        been asked to leave, so that it ended is not held against its trial."""
        self.changed_at = seq
        grant = self.grant_of(worker)
        if grant is None:
            return
        trial = self.trials[grant.trial]
        worked_s = max(0.0, at_s - trial.granted_at_s)
        result = Result(outcome="lost", rounds=trial.saved, step=trial.step, saved=trial.saved, worked_s=worked_s)
        self._end_slice(grant, result, at_s, bill, held_against=not asked)

    def _propose(self, event: ev.TrialsProposed) -> None:
        if event.first != len(self.trials):
            return
        self.exhausted = self.exhausted or event.exhausted
        self.failure = self.failure or event.failure
        for proposal in event.proposals:
            self.num_draws = max(self.num_draws, proposal.draw + 1)
            values, parent = proposal.values, proposal.parent
            self._add(Trial(number=len(self.trials), values=values, by=proposal.by, parent=parent))

    def _grant(self, grant: Grant, at_s: float) -> None:
        trial = self.trials[grant.trial]
        self.num_slices = max(self.num_slices, grant.number)
        if trial.over or trial.status == "running" or grant.worker in self.running:
            return
        self._put(replace(trial, status="running", grant=grant, granted_at_s=at_s, began_at_s=trial.began_at_s or at_s))

    def _end_slice(self, grant: Grant, result: Result, at_s: float, bill: Bill, *, held_against: bool = True) -> None:
        trial = self.trials[grant.trial]
        again = result.outcome == "lost" or (result.outcome == "failed" and self.terms.retry_raised)
        retries = trial.retries + (again and held_against)
        status = self._status_after(result, retries, again)
        over = status in ("finished", "diverged", "failed")
        ended = replace(
            trial,
            status=status,
            rounds=result.rounds,
            step=result.step,
            metrics={**trial.metrics, **result.metrics},
            curve=joined(trial.curve, result.curve, self.levels),
            saved=result.saved,
            saved_on=bill.node if result.saved and result.outcome != "lost" else trial.saved_on,
            ran_on=bill.node,
            retries=retries,
            device_s=trial.device_s + result.worked_s * bill.num_devices,
            cost=trial.cost + bill.cost(result.worked_s),
            ended_at_s=at_s if over else 0.0,
            failure=result.failure,
            reason=_ending(status, result, retries) if over else None,
        )
        if result.metrics:
            self.failed_in_a_row = 0
        elif status == "failed":
            self.failed_in_a_row += 1
        self.last_ended = trial.number
        self._put(ended)

    def _status_after(self, result: Result, retries: int, again: bool) -> TrialStatus:
        match result.outcome:
            case "finished" | "diverged":
                return result.outcome
            case "failed" | "lost":
                return "waiting" if again and retries <= self.terms.retries else "failed"
            case "reached":
                return "finished" if self.terms.rounds and result.rounds >= self.terms.rounds else "paused"
            case "halted" | "expired":
                return "waiting"
            case _:
                assert_never(result.outcome)

    def _change_terms(self, terms: StudySpec) -> None:
        kept = self.keep()
        if terms.space != self.terms.space:  # its points are others from the first draw on
            kept = replace(kept, num_draws=0)
        seq = self.changed_at
        self._clear()
        self.changed_at = seq
        self._take_terms(terms)
        self._fill(msgspec.structs.replace(kept, terms=terms, exhausted=False, failure=None))

    # The tables

    def _add(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._note(trial.number)
        self.points.setdefault(key_of(trial.values), trial.number)
        self._enter(trial)

    def _put(self, trial: Trial) -> None:
        self._leave(self.trials[trial.number])
        self.trials[trial.number] = trial
        self._note(trial.number)
        self._enter(trial)

    def _note(self, number: int) -> None:
        self._changes.pop(number, None)
        self._changes[number] = self.changed_at

    def _enter(self, trial: Trial) -> None:
        self.counts[trial.status] = self.counts.get(trial.status, 0) + 1
        self.device_s += trial.device_s
        self.num_rounds += trial.rounds
        self.cost += trial.cost
        value = self.signed(trial)
        if math.isfinite(value) and trial.status not in ("diverged", "failed") and self.meets_limits(trial):
            insort(self.ranking, (value, trial.number))
        for rounds, standing in self._stands(trial):
            insort(self.rungs.setdefault(rounds, Rung()).standings, standing)
        if trial.status == "waiting":
            self.waiting[trial.number] = None
        elif trial.status == "running":
            grant = self._grant_of(trial.number)
            self.running[grant.worker] = trial.number
            self.prepaid_s += grant.prepaid_s
        elif trial.status == "paused":
            self.paused[trial.number] = None
            if trial.rounds in self.rungs:
                insort(self.rungs[trial.rounds].waiting, (value, trial.number))

    def _leave(self, trial: Trial) -> None:
        self.counts[trial.status] -= 1
        if not self.counts[trial.status]:
            del self.counts[trial.status]
        self.device_s -= trial.device_s
        self.num_rounds -= trial.rounds
        self.cost -= trial.cost
        value = self.signed(trial)
        remove(self.ranking, (value, trial.number))
        for rounds, standing in self._stands(trial):
            remove(self.rungs[rounds].standings, standing)
        self.waiting.pop(trial.number, None)
        self.paused.pop(trial.number, None)
        if trial.status == "running":
            grant = self._grant_of(trial.number)
            del self.running[grant.worker]
            self.prepaid_s -= grant.prepaid_s
        elif trial.status == "paused" and trial.rounds in self.rungs:
            remove(self.rungs[trial.rounds].waiting, (value, trial.number))

    def _stands(self, trial: Trial) -> list[tuple[int, Standing]]:
        """The rungs at which it has a value. A trial that diverged stands last wherever it came or was to come."""
        objective = self.objectives[0]
        if trial.status == "diverged":
            upto = max(trial.rounds, trial.grant.until if trial.grant is not None else 0)
            return [(level, (math.inf, trial.number)) for level in self.levels if level <= upto]
        return [
            (rounds, (objective.signed(value), trial.number)) for rounds, value in trial.curve if rounds in self.levels
        ]

    def _grant_of(self, trial: int) -> Grant:
        grant = self.trials[trial].grant
        assert grant is not None
        return grant

    # Snapshots

    def keep(self) -> Kept:
        return Kept(
            terms=self.terms,
            trials=list(self.trials),
            num_slices=self.num_slices,
            num_draws=self.num_draws,
            waiting=tuple(self.waiting),
            exhausted=self.exhausted,
            failure=self.failure,
            failed_in_a_row=self.failed_in_a_row,
            last_ended=self.last_ended,
        )

    @staticmethod
    def restored(kept: Kept, seq: int = -1) -> "Study":
        """What a snapshot of record `seq` kept: all of it counts as changed there, for those who saw less."""
        study = Study(kept.terms)
        study.changed_at = seq
        study._fill(kept)
        return study

    def _clear(self) -> None:
        fresh = Study(self.terms)
        vars(self).update(vars(fresh))

    def _fill(self, kept: Kept) -> None:
        for trial in kept.trials:
            self._add(trial)
        self.num_slices, self.num_draws = kept.num_slices, kept.num_draws
        self.waiting = dict.fromkeys(kept.waiting)
        self.exhausted, self.failure = kept.exhausted, kept.failure
        self.failed_in_a_row, self.last_ended = kept.failed_in_a_row, kept.last_ended

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Study) and self.keep() == other.keep()

    __hash__ = None  # type: ignore[assignment]


def _ending(status: TrialStatus, result: Result, retries: int) -> Reason:
    rounds = f"after {result.rounds} round{'' if result.rounds == 1 else 's'}"
    if status == "diverged":
        return Reason(code="diverged", text=f"it reported a value that is not finite {rounds}")
    if status == "finished":
        return Reason(code="finished", text=f"its function returned {rounds}" if result.outcome == "finished"
                      else f"it has had all its rounds, {result.rounds}")  # fmt: skip
    if result.outcome == "lost":
        return Reason(code="trial-lost", text=f"its worker died, {retries} time{'' if retries == 1 else 's'} in all")
    return Reason(code="trial-failed", text=result.failure.message if result.failure is not None else "it failed")
