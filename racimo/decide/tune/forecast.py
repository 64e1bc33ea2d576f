"""What a study will have cost, and when it ends: its own scheduler played to the end on trials like those that are in.

Every new trial is taken to be like one that is known: as fast, with a curve that lies about its own. How a curve goes
on is taken from those that went further. Nothing of the real study is changed.
"""

import heapq
import math
from typing import Literal

import msgspec
from msgspec.structs import replace

from racimo.decide.tune.draw import uniform
from racimo.decide.tune.lanes import next_move
from racimo.decide.tune.moves import Begin, Clone, End, Go
from racimo.decide.tune.purse import LET_GO_S
from racimo.decide.tune.schedule import scheduler_of
from racimo.state import events as ev
from racimo.state.nouns import Reason
from racimo.state.study import Bill, Study
from racimo.state.trials import Grant, Proposal, Result, SliceOutcome, Trial

NUM_PLAYS = 5
"""Of which the mean is taken: how many trials a scheduler lets go on depends on the order in which good ones come."""
ENOUGH_TRIALS = 10
"""Trials that have told something, from which on a forecast is a good one."""
MAX_NEW_TRIALS = 400
"""That are played; of more, the rest is taken to be like these."""
_RUN, _WHY = "forecast", Reason(code="forecast", text="")
SECONDS_PER_HOUR = 3600.0


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Of the whole study, what is spent already included. `ends_in_s`: seconds from now. `limit`: what ends it before
    its trials do. `good`: enough trials are in."""

    device_s: float
    cost: float
    ends_in_s: float
    num_trials: int
    limit: Literal["", "budget", "time"] = ""
    good: bool = False


class Spent(msgspec.Struct, frozen=True):
    """Leases so far: device-seconds, money, and the device-seconds until workers were ready."""

    device_s: float
    cost: float
    starting_s: float = 0.0


def forecast(
    study: Study,
    now_s: float,
    *,
    num_workers: int,
    devices_per_worker: int = 1,
    price_per_device_hour: float = 0.0,
    round_s: float | None = None,
    active_s: float = 0.0,
    leased: Spent | None = None,
) -> Forecast | None:
    """With so many workers from now to the end. `round_s`: a guess, for as long as no trial has told a round;
    `active_s`: seconds that the study has had already; `leased`: what its workers' leases have come to so far, which is
    more than their slices. None where nothing is known about a round's length."""
    told = [trial for trial in study.trials if trial.rounds and trial.device_s > 0]
    if not told and round_s is None:
        return None
    elapsed_s = devices_per_worker * sum(
        max(0.0, now_s - study.trials[number].granted_at_s) for number in study.running.values()
    )
    between_s = 0.0
    if leased is not None and study.num_slices:
        idle_s = leased.device_s - leased.starting_s - study.device_s - elapsed_s
        between_s = max(0.0, idle_s) / devices_per_worker / study.num_slices
    plays = [
        _Play(study, now_s, told, devices_per_worker, round_s or 0.0, between_s, number) for number in range(NUM_PLAYS)
    ]
    ends = [play.play(num_workers) for play in plays]
    ahead_s, later_s = (sum(column) / NUM_PLAYS for column in zip(*ends, strict=True))
    played, rest = plays[0], plays[0].share_not_played
    price = price_per_device_hour / SECONDS_PER_HOUR
    spent = leased or Spent(study.device_s + elapsed_s, study.cost + elapsed_s * price)
    more_s = later_s * devices_per_worker * (1.0 + rest)
    ends_in_s, num_more = ahead_s * (1.0 + rest), played.num_trials - len(study.trials) + rest * played.num_new
    limit, share = _limit(study, spent.cost, more_s * price, ends_in_s, active_s)
    device_s, cost, ends_in_s = spent.device_s + more_s * share, spent.cost + more_s * share * price, ends_in_s * share
    num_trials = len(study.trials) + round(num_more * share)
    return Forecast(
        device_s=device_s, cost=cost, ends_in_s=ends_in_s, num_trials=num_trials, limit=limit,
        good=len(told) >= ENOUGH_TRIALS,
    )  # fmt: skip


def _limit(
    study: Study, spent: float, more: float, ends_in_s: float, active_s: float
) -> tuple[Literal["", "budget", "time"], float]:
    """The limit that is reached first, and the share of what lies ahead that is done by then."""
    money, time_s = study.terms.money, study.terms.time_s
    time_s = None if time_s is None else time_s - LET_GO_S  # by then the last slices end
    shares: list[tuple[float, Literal["budget", "time"]]] = []
    if money is not None and spent + more > money and more > 0:
        shares.append((max(0.0, money - spent) / more, "budget"))
    if time_s is not None and active_s + ends_in_s > time_s:
        shares.append((max(0.0, time_s - active_s) / ends_in_s, "time"))
    if not shares:
        return "", 1.0
    share, limit = min(shares)
    return limit, share


class _Play:
    """The study's further course on a clock of its own."""

    def __init__(
        self,
        study: Study,
        now_s: float,
        told: list[Trial],
        devices: int,
        round_s: float,
        between_s: float,
        number: int,
    ) -> None:
        self._number, self._between_s = number, between_s
        kept = study.keep()
        ahead = max(0, study.terms.trials - len(study.trials))
        self.num_new = min(ahead, MAX_NEW_TRIALS)
        self.share_not_played = (ahead - self.num_new) / self.num_new if self.num_new else 0.0
        terms = replace(study.terms, trials=len(study.trials) + self.num_new, budget="", time="")
        self._study = Study.restored(replace(kept, terms=terms))
        self._scheduler = scheduler_of(self._study)
        self._known, self._devices, self._round_s, self._now_s = told, devices, round_s, now_s
        self._by_number = {trial.number: trial for trial in told}
        self._spread = _bandwidth([_value_at(study, trial, 1 << 62) for trial in told])
        ends = [trial.rounds for trial in told if trial.status == "finished"]
        self._longest = max((trial.rounds for trial in told), default=1)
        self._falls: dict[tuple[int, int], float] = {}
        self._end = terms.rounds or (round(sum(ends) / len(ends)) if ends else self._longest)
        self._seq = study.changed_at + 1

    @property
    def num_trials(self) -> int:
        return len(self._study.trials)

    def play(self, num_workers: int) -> tuple[float, float]:
        """(seconds until the last slice ends, seconds from now on of all slices together)"""
        study, clock, worked = self._study, 0.0, 0.0
        busy: list[tuple[float, int]] = []
        for worker, number in sorted(study.running.items()):
            trial = study.trials[number]
            left_s = max(0.0, self._slice_s(trial) - max(0.0, self._now_s - trial.granted_at_s))
            heapq.heappush(busy, (left_s, worker))
            worked += left_s
        free = [worker for worker in range(num_workers) if worker not in study.running][: num_workers - len(busy)]
        while True:
            while free:
                granted = self._grant(free[-1])
                if granted is None:
                    break
                worker = free.pop()
                heapq.heappush(busy, (clock + granted + self._between_s, worker))
                worked += granted + self._between_s
            if not busy:
                return clock, worked
            clock, worker = heapq.heappop(busy)
            self._finish(worker)
            free.append(worker)

    def _tell(self, event: ev.TrialsProposed | ev.SliceGranted | ev.SliceEnded | ev.TrialEnded) -> None:
        self._seq += 1
        self._study.apply(event, self._seq, self._now_s, Bill(num_devices=self._devices))

    def _grant(self, worker: int) -> float | None:
        """Gives the worker what it would be given; the slice's length, or None if there is nothing for it."""
        study = self._study
        while True:
            move = next_move(study, self._scheduler, ())
            match move:
                case None:
                    return None
                case End():
                    self._tell(ev.TrialEnded(run=_RUN, trial=move.trial, status="stopped", reason=_WHY))
                case Begin():
                    self._propose(Proposal(values={"trial": len(study.trials)}))
                case Clone():
                    self._propose(Proposal(values=move.values, parent=move.parent))
                case Go():
                    grant = Grant(number=study.num_slices + 1, trial=move.trial, worker=worker, until=move.until)
                    self._tell(ev.SliceGranted(run=_RUN, attempt=1, grant=grant, reason=_WHY))
                    return self._slice_s(study.trials[move.trial])

    def _propose(self, proposal: Proposal) -> None:
        self._tell(ev.TrialsProposed(run=_RUN, first=len(self._study.trials), proposals=(proposal,)))

    def _finish(self, worker: int) -> None:
        study = self._study
        grant = study.grant_of(worker)
        assert grant is not None
        trial = study.trials[grant.trial]
        rounds, value = self._upto(trial), 0.0
        model = self._model(trial)
        diverges = model is not None and model.status == "diverged" and rounds >= model.rounds
        outcome: SliceOutcome = "diverged" if diverges else "finished" if rounds >= self._end else "reached"
        if model is not None:
            value = _value_at(study, model, rounds) - self._fall(model.rounds, rounds)
        if trial.number not in self._by_number:
            value += self._spread * _normal(self._number, trial.number)
        shown = value if study.objectives[0].minimize else -value
        metrics = {study.objectives[0].metric: shown} if math.isfinite(shown) else {}
        result = Result(
            outcome=outcome, rounds=rounds, step=rounds, metrics=metrics, saved=rounds,
            curve=((rounds, shown),) if metrics else (), worked_s=self._slice_s(trial),
        )  # fmt: skip
        self._tell(ev.SliceEnded(run=_RUN, attempt=1, index=worker, number=grant.number, result=result))

    def _fall(self, before: int, after: int) -> float:
        """How much better trials get on the average from one round to a later one: what those told that went so far."""
        after = min(after, self._longest)
        if after <= before:
            return 0.0
        if (before, after) not in self._falls:
            went = [trial for trial in self._known if trial.rounds >= after]
            falls = [_value_at(self._study, t, before) - _value_at(self._study, t, after) for t in went]
            finite = [fall for fall in falls if math.isfinite(fall)]
            self._falls[before, after] = sum(finite) / len(finite) if finite else 0.0
        return self._falls[before, after]

    def _upto(self, trial: Trial) -> int:
        """The rounds that it has at the end of its slice."""
        assert trial.grant is not None
        until = min(trial.grant.until or self._end, max(self._end, trial.rounds + 1))
        model = self._model(trial)
        if model is not None and model.status == "diverged":
            until = min(until, max(model.rounds, trial.rounds + 1))
        return max(until, trial.rounds + 1)

    def _slice_s(self, trial: Trial) -> float:
        model = self._model(trial)
        round_s = model.device_s / self._devices / model.rounds if model is not None else self._round_s
        return round_s * (self._upto(trial) - trial.rounds)

    def _model(self, trial: Trial) -> Trial | None:
        """The real trial that this one is like: itself if it has told something."""
        known = self._by_number.get(trial.number)
        if known is not None or not self._known:
            return known
        return self._known[int(uniform("like", self._number, trial.number) * len(self._known))]


def _bandwidth(values: list[float]) -> float:
    """How far new trials lie about those that they are like, so that there are better ones among them at the rate at
    which better ones do come (a smoothed bootstrap; Silverman 1986, rule of thumb for the width of a kernel)."""
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) < 2:
        return 1.0
    mean = sum(finite) / len(finite)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in finite) / (len(finite) - 1))
    quartiles = (finite[(3 * len(finite)) // 4] - finite[len(finite) // 4]) / 1.34
    return 1.06 * (min(deviation, quartiles) or deviation) * float(len(finite) ** -0.2)


def _normal(*key: int) -> float:
    """A number that looks normally distributed and follows from the key alone (Irwin-Hall)."""
    return sum(uniform("forecast", *key, part) for part in range(12)) - 6.0


def _value_at(study: Study, trial: Trial, rounds: int) -> float:
    """Its value (less is better) after so many rounds, or the newest before."""
    values = [value for at, value in trial.curve if at <= rounds]
    return study.objectives[0].signed(values[-1]) if values else math.inf
