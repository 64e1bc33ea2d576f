"""The simulated clock on which systems that tune are compared, and what is made of its times."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from bench.tables import statistics
from bench.tables.clock import Limits, Move, Played, play
from bench.tables.objectives import Curve, Range, Values
from bench.tables.ours import Racimo
from bench.tables.peers_random import RandomSearch
from bench.tune_lines import num_changed

Loss = Callable[[float, int], float]


class Line:
    """Regret is |x - 0.25| x 2, reached in ten rounds; a round takes 1 + x seconds."""

    name, rounds, best, worst = "line", 10, 0.0, 1.0
    space = (Range("x", "float", 0.0, 1.0, False),)

    def __init__(self, diverges_above: float = 2.0) -> None:
        self._diverges_above = diverges_above

    def curve(self, values: Values) -> Curve:
        x = values["x"]
        losses = np.array([2 * abs(x - 0.25) + 1 - r / self.rounds for r in range(1, self.rounds + 1)])
        if x > self._diverges_above:
            losses[1:] = math.nan
        return Curve(losses, np.full(self.rounds, 1.0 + x))


class Fixed:
    """Trains given points to their end, in order, and then waits."""

    def __init__(self, *points: float) -> None:
        self._points = list(enumerate(points))

    def moves(self, idle: list[int]) -> list[Move]:
        found = []
        for worker in idle[: len(self._points)]:
            trial, x = self._points.pop(0)
            found.append(Move(worker, trial, {"x": x}, 0))
        return found

    def report(self, worker: int, trial: int, rounds: int, loss: float, seconds: float) -> bool:
        return rounds < 10


def test_a_worker_trains_one_round_after_the_other_and_the_target_has_its_second() -> None:
    played = play(Fixed(0.25), Line(), 1, Limits(horizon_s=1_000.0))
    assert played.target_s == pytest.approx(10 * 1.25)
    assert (played.trials, played.rounds) == (1, 10)


def test_workers_train_at_the_same_time() -> None:
    played = play(Fixed(0.9, 0.25), Line(), 2, Limits(horizon_s=1_000.0))
    assert played.target_s == pytest.approx(10 * 1.25)


def test_a_run_ends_at_its_horizon_without_the_target() -> None:
    played = play(Fixed(0.9, 0.8), Line(), 1, Limits(horizon_s=15.0))
    assert played.target_s is None and played.end_s == 15.0
    assert played.rounds == 7  # the eighth would end after 15 s


def test_rounds_of_a_trial_that_diverged_count_as_lost_before_and_after() -> None:
    played = play(Fixed(0.9, 0.1), Line(diverges_above=0.5), 1, Limits(horizon_s=1_000.0))
    assert (played.rounds, played.diverged_rounds) == (20, 10)


def test_our_scheduler_in_simulated_time_stops_what_diverged_at_once_and_pauses_what_is_not_good() -> None:
    system = Racimo(Line(diverges_above=0.22), 4, seed=3, proposer="random")
    played = play(system, Line(diverges_above=0.22), 4, Limits(horizon_s=math.inf, rounds=600, target=-1.0))
    diverged = [trial for trial in system.study.trials if trial.status == "diverged"]
    assert diverged and all(trial.rounds == 2 for trial in diverged)
    assert system.study.paused and played.idle_s == 0.0
    assert system.study.ranking[0][0] < 0.1


def test_our_scheduler_plays_the_same_run_twice() -> None:
    def once() -> Played:
        return play(Racimo(Line(), 4, seed=5, proposer="quasi-random"), Line(), 4, Limits(horizon_s=300.0))

    assert once() == once()


def test_random_search_trains_everything_to_the_end() -> None:
    played = play(RandomSearch(Line(), 1), Line(), 4, Limits(horizon_s=math.inf, rounds=400, target=-1.0))
    assert 40 <= played.trials <= 44


def test_who_never_reached_the_target_needed_the_horizon() -> None:
    assert statistics.median_s([1.0, None, 3.0], 10.0) == 3.0
    assert statistics.median_s([None, None, 3.0], 10.0) == 10.0
    assert statistics.reached([1.0, None]) == 0.5


def test_a_clear_difference_is_significant_and_chance_is_not() -> None:
    source = np.random.default_rng(1)
    fast, slow = list(source.normal(10, 1, 30)), list(source.normal(20, 1, 30))
    same = list(source.normal(10, 1, 30))
    assert statistics.slower_p(statistics.resampled_ratios(slow, fast, 100.0), 1.2) < 0.001
    assert statistics.slower_p(statistics.resampled_ratios(same, fast, 100.0), 1.2) > 0.9


def test_holm_rejects_in_order_until_one_does_not_pass() -> None:
    assert statistics.holm([0.04, 0.001, 0.03]) == [False, True, False]
    assert statistics.holm([0.01, 0.02, 0.04]) == [True, True, True]
    assert statistics.holm([0.03]) == [True]


def test_a_replaced_line_counts_once() -> None:
    before = ["a", "b", "c"]
    assert num_changed(before, ["a", "x", "c"]) == 1
    assert num_changed(before, ["a", "b", "c", "d", "e"]) == 2
    assert num_changed(before, before) == 0
