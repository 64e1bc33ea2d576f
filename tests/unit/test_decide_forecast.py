"""What a study will have cost is known once a few of its trials are in."""

import heapq
import random
from typing import Any

import pytest

from racimo.decide.tune.forecast import Forecast, forecast
from racimo.decide.tune.lanes import next_move
from racimo.decide.tune.moves import Begin, Clone, End, Go
from racimo.decide.tune.purse import LET_GO_S
from racimo.decide.tune.schedule import scheduler_of
from racimo.spec.study import StudySpec
from racimo.state import events as ev
from racimo.state.nouns import Reason
from racimo.state.study import Bill, Study
from racimo.state.trials import Grant, Proposal, Result

WHY = Reason(code="test", text="")
WORKERS = 4


class Truth:
    """A study whose trials have their own speeds and curves, played on a clock of its own."""

    def __init__(self, seed: int, **terms: Any) -> None:
        self.study = Study(StudySpec(**{"space": {"x": "0.0..1.0"}, "metric": "loss", **terms}))
        self.scheduler = scheduler_of(self.study)
        self.chance = random.Random(seed)
        self.speed: dict[int, float] = {}
        self.level: dict[int, float] = {}
        self.now_s, self.seq = 0.0, 0
        self.busy: list[tuple[float, int]] = []
        self.free = list(range(WORKERS))

    def tell(self, event: Any) -> None:
        self.seq += 1
        self.study.apply(event, self.seq, self.now_s, Bill(node="n", price_per_device_hour=3600.0))

    def play(self, until_told: int = 10**9) -> None:
        """Until so many trials have told something."""
        while True:
            while self.free and self._give(self.free[-1]):
                self.free.pop()
            if not self.busy or sum(trial.rounds > 0 for trial in self.study.trials) >= until_told:
                return
            self.now_s, worker = heapq.heappop(self.busy)
            self._end(worker)
            self.free.append(worker)

    def _give(self, worker: int) -> bool:
        study = self.study
        while True:
            move = next_move(study, self.scheduler, ())
            match move:
                case None:
                    return False
                case Begin() | Clone():
                    point = Proposal(values={"x": float(len(study.trials))}, parent=getattr(move, "parent", None))
                    self.tell(ev.TrialsProposed(run="s", first=len(study.trials), proposals=(point,)))
                case End():
                    self.tell(ev.TrialEnded(run="s", trial=move.trial, status="stopped", reason=WHY))
                case Go():
                    grant = Grant(number=study.num_slices + 1, trial=move.trial, worker=worker, until=move.until)
                    self.tell(ev.SliceGranted(run="s", attempt=1, grant=grant, reason=WHY))
                    trial = study.trials[move.trial]
                    speed = self.speed.setdefault(trial.number, self.chance.uniform(0.8, 1.2))
                    rounds = (move.until or study.terms.rounds or 9) - trial.rounds
                    heapq.heappush(self.busy, (self.now_s + speed * rounds, worker))
                    return True

    def _end(self, worker: int) -> None:
        grant = self.study.grant_of(worker)
        assert grant is not None
        trial = self.study.trials[grant.trial]
        end = self.study.terms.rounds or 9
        rounds = grant.until or end
        loss = self.level.setdefault(trial.number, self.chance.random()) + 1.0 / rounds
        result = Result(
            outcome="finished" if rounds >= end else "reached", rounds=rounds, metrics={"loss": loss},
            curve=((rounds, loss),), saved=rounds, worked_s=self.now_s - trial.granted_at_s,
        )  # fmt: skip
        self.tell(ev.SliceEnded(run="s", attempt=1, index=worker, number=grant.number, result=result))

    def forecast(self, **more: Any) -> Forecast | None:
        return forecast(self.study, self.now_s, num_workers=WORKERS, price_per_device_hour=3600.0, **more)


@pytest.mark.parametrize("scheduler", ["asha", "none", "median", "freeze-thaw", "population"])
def test_once_ten_trials_are_in_it_is_within_fifteen_percent(scheduler: str) -> None:
    """Half of the time: how many good trials are still to come nobody knows."""
    errors: dict[str, list[float]] = {"device_s": [], "cost": [], "ends_in_s": []}
    for seed in range(7):
        truth = Truth(seed, trials=120, rounds=27, scheduler=scheduler, parallel=8 if scheduler == "population" else 0)
        truth.play(until_told=10 if scheduler != "population" else 8)
        told, began_s = truth.forecast(), truth.now_s
        assert told is not None
        truth.play()
        errors["device_s"].append(abs(told.device_s / truth.study.device_s - 1.0))
        errors["cost"].append(abs(told.cost / truth.study.cost - 1.0))
        errors["ends_in_s"].append(abs(told.ends_in_s / (truth.now_s - began_s) - 1.0))
    for name, found in errors.items():
        assert sorted(found)[len(found) // 2] <= (0.2 if name == "ends_in_s" else 0.15), f"{name}: {found}"


def test_a_forecast_changes_nothing() -> None:
    truth = Truth(0, trials=60, rounds=9)
    truth.play(until_told=10)
    before = truth.study.keep()
    assert truth.forecast() == truth.forecast()
    assert truth.study.keep() == before


def test_before_the_start_a_guess_of_a_round_is_enough_and_without_one_nothing_is_said() -> None:
    truth = Truth(0, trials=90, rounds=9)
    assert truth.forecast() is None
    told = truth.forecast(round_s=1.0)
    assert told is not None and not told.good and told.num_trials == 90
    truth.play()
    assert told.device_s == pytest.approx(truth.study.device_s, rel=0.3)


def test_a_budget_that_is_too_small_is_named_and_not_exceeded() -> None:
    truth = Truth(0, trials=100, rounds=27, budget="$40")
    truth.play(until_told=10)
    told = truth.forecast()
    assert told is not None and told.limit == "budget" and told.cost == pytest.approx(40.0)
    assert told.num_trials < 100


def test_a_time_limit_that_comes_first_is_named() -> None:
    truth = Truth(0, trials=100, rounds=27, time="30s")
    truth.play(until_told=10)
    told = truth.forecast(active_s=truth.now_s)
    assert told is not None and told.limit == "time"
    assert told.ends_in_s == pytest.approx(30.0 - LET_GO_S - truth.now_s)


def test_a_hundred_thousand_trials_are_forecast_from_the_first_hundreds() -> None:
    truth = Truth(0, trials=100_000, rounds=9)
    truth.play(until_told=10)
    told = truth.forecast()
    assert told is not None and told.num_trials == 100_000
    assert told.device_s == pytest.approx(100_000 * (1 + 2 / 3 + 6 / 9), rel=0.2)
