"""A hundred studies with budgets, in worlds where everything is late, hangs or dies: no cent too much is spent."""

import pytest

from racimo.sim.studies import Odds, StudyPlay, random_study
from racimo.spec.study import StudySpec

NUM_SEEDS = 100


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_budget_is_never_exceeded(seed: int) -> None:
    play = random_study(seed)
    ended = play.run()
    assert play.terms.money is not None and ended.spent <= play.terms.money
    assert ended.counted == pytest.approx(ended.spent), "what the core counts is what was spent"


def test_a_study_that_has_enough_to_do_uses_its_budget() -> None:
    terms = StudySpec(space={"x": "0.0..1.0"}, metric="loss", proposer="random", trials=10_000, rounds=9, budget=6.0)
    ended = StudyPlay(0, terms, Odds()).run()
    assert ended.code == "budget-spent" and ended.spent > 0.94 * 6.0


def test_a_time_limit_is_kept_by_workers_that_hang() -> None:
    terms = StudySpec(space={"x": "0.0..1.0"}, metric="loss", proposer="random", trials=10_000, rounds=9, time="2m")
    ended = StudyPlay(0, terms, Odds(hangs=0.2)).run()
    assert ended.code == "time-over" and ended.took_s <= 120.5


def test_a_budget_holds_while_the_control_process_is_away_for_good_long_times() -> None:
    terms = StudySpec(space={"x": "0.0..1.0"}, metric="loss", proposer="random", trials=10_000, rounds=9, budget=2.0)
    ended = StudyPlay(3, terms, Odds(away=0.05, away_s=10_000.0)).run()
    assert ended.spent <= 2.0
