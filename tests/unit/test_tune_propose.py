"""Proposers that learn: they find what is good, never the same twice, and the same after any restart."""

import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from racimo.decide.tune.draw import uniform
from racimo.spec.proposer import NUM_BEST, NUM_NEWEST, WINDOW_STEP, Outcome, Proposer, Values
from racimo.spec.space import key_of
from racimo.spec.study import StudySpec
from racimo.worker.tune.propose import make_proposer
from racimo.worker.tune.propose_standing import Standings, scores

LEARNING = ("tpe", "gp", "cma-es", "nsga-ii")
TWO_NUMBERS = {"x": "0.0..1.0", "y": "0.0..1.0"}
EVERY_KIND = {
    "lr": "log 1e-5..1e-1",
    "width": "32..256 step 32",
    "depth": "1..8",
    "momentum": "0.0..0.9 step 0.1",
    "norm": [True, 1, "1", None],
    "optimizer": ["sgd", "adam"],
    "beta": {"is": "0.9..0.999", "when": {"optimizer": "adam"}},
    "nesterov": {"is": [False, True], "when": {"optimizer": "sgd"}},
}


def terms_of(proposer: str, space: dict[str, Any] | None = None, **more: Any) -> StudySpec:
    return StudySpec(space=space or TWO_NUMBERS, proposer=proposer, **{"metric": "loss", **more})


def bowl(values: Values) -> float:
    return sum((float(value) - 0.3) ** 2 for value in values.values() if isinstance(value, float))


def first_outcomes(terms: StudySpec, count: int, loss: Callable[[Values], float], seed: int = 0) -> list[Outcome]:
    """Random points as the decision draws them, with their results."""
    space, found = terms.parsed_space, []
    for number in range(count):
        values = space.at([uniform("test", seed, number, axis) for axis in range(len(space.parameters))])
        found.append(Outcome(number=number, values=values, status="finished", rounds=9, metrics={"loss": loss(values)}))
    return found


def next_points(terms: StudySpec, known: list[Outcome], count: int) -> list[Any]:
    """The next point by each of so many seeds."""
    found = []
    for seed in range(count):
        proposer = make_proposer(terms, seed, Path())
        proposer.tell(known)
        found += [point.values for point in proposer.ask(1)]  # type: ignore[attr-defined]
    return found


def play(proposer: Proposer, known: list[Outcome], count: int, loss: Callable[[Values], float]) -> list[Outcome]:
    """One trial after the other, each with its result before the next."""
    proposer.tell(known)
    told = list(known)
    for _ in range(count):
        (point,) = proposer.ask(1)  # of these spaces there is always a usable one
        values = dict(getattr(point, "values", point))
        outcome = Outcome(number=len(told), values=values, status="finished", rounds=9, metrics={"loss": loss(values)})
        told.append(outcome)
        proposer.tell([outcome])
    return told


@pytest.mark.parametrize("name", LEARNING)
def test_a_proposer_that_learns_does_better_than_chance(name: str) -> None:
    terms = terms_of(name)
    known = first_outcomes(terms, 10, bowl)
    told = play(make_proposer(terms, 0, Path()), known, 30, bowl)
    by_chance = first_outcomes(terms, 40, bowl)
    late = sorted(bowl(one.values) for one in told[-15:])[7]
    assert late < sorted(bowl(one.values) for one in by_chance)[13], "its median is among the best third of chance"


@pytest.mark.parametrize("name", LEARNING)
def test_all_that_is_proposed_lies_in_the_space(name: str) -> None:
    terms = terms_of(name, EVERY_KIND, constraints=("width * depth <= 1024",))
    space = terms.parsed_space
    loss = lambda values: float(values["lr"]) + (1.0 if values["optimizer"] == "sgd" else 0.0)  # noqa: E731
    known = first_outcomes(terms, 12, loss)
    told = play(make_proposer(terms, 3, Path()), known, 12, loss)
    for outcome in told[12:]:
        assert space.complete(outcome.values) == outcome.values
        assert [type(value) for value in space.complete(outcome.values).values()] == [
            type(value) for value in outcome.values.values()
        ]


@pytest.mark.parametrize("name", LEARNING)
def test_what_is_proposed_follows_from_seed_history_and_number_alone(name: str) -> None:
    terms = terms_of(name, {**TWO_NUMBERS, "kind": ["a", "b"]})
    one = make_proposer(terms, 5, Path())
    told = play(one, first_outcomes(terms, 12, bowl), 9, bowl)
    pending = Outcome(number=len(told), values={"x": 0.5, "y": 0.5, "kind": "a"}, status="running")
    one.tell([pending])
    another = make_proposer(terms, 5, Path())  # after a restart: everything at once, in another order
    shuffled = [*told, pending]
    random.Random(1).shuffle(shuffled)
    another.tell(shuffled)
    assert list(one.ask(3)) == list(another.ask(3))
    assert list(one.ask(3)) == list(another.ask(3)), "asking changes nothing"
    other_seed = make_proposer(terms, 6, Path())
    other_seed.tell(shuffled)
    assert list(other_seed.ask(3)) != list(one.ask(3))


@pytest.mark.parametrize("name", LEARNING)
def test_several_points_at_once_differ(name: str) -> None:
    terms = terms_of(name)
    proposer = make_proposer(terms, 0, Path())
    proposer.tell(first_outcomes(terms, 12, bowl))
    keys = {key_of(point.values) for point in proposer.ask(8)}  # type: ignore[attr-defined]
    assert len(keys) == 8


@pytest.mark.parametrize("name", LEARNING)
def test_of_a_small_space_no_point_comes_twice_and_then_none(name: str) -> None:
    """optuna#5489, #2946: points repeat."""
    terms = terms_of(name, {"a": "1..4", "b": ["u", "v", "w"]})
    loss = lambda values: float(values["a"])  # noqa: E731
    space = terms.parsed_space
    known = [
        Outcome(number=n, values=space.grid_point(n), status="finished", rounds=1, metrics={"loss": 1.0 * n})
        for n in range(10)
    ]
    proposer = make_proposer(terms, 0, Path())
    proposer.tell(known)
    found = list(proposer.ask(5))
    assert len(found) <= 2, "there are twelve points in all"
    assert {key_of(point.values) for point in found} <= {key_of(space.grid_point(n)) for n in (10, 11)}  # type: ignore[attr-defined]
    assert loss(known[0].values) == 1.0


def test_the_search_leaves_where_trials_diverge() -> None:
    """ray#6659: what is NaN must not look like a good result, nor like none at all."""
    terms = terms_of("tpe")
    space = terms.parsed_space
    known = []
    for number in range(40):
        values = space.at([uniform("nan", number, axis) for axis in range(2)])
        diverged = float(values["x"]) > 0.4  # type: ignore[arg-type]
        known.append(
            Outcome(
                number=number, values=values, status="diverged" if diverged else "paused", rounds=5 if diverged else 1,
                metrics={"loss": math.nan if diverged else 1.0},
            )
        )  # fmt: skip
    points = next_points(terms, known, 20)
    assert sum(point["x"] > 0.4 for point in points) <= 5, "of chance it would be twelve"


@pytest.mark.parametrize("name", LEARNING)
def test_a_trial_that_went_further_counts_for_more(name: str) -> None:
    terms = terms_of(name, {"x": "0.0..1.0"})
    known = []
    for number in range(45):
        x = uniform("further", number)
        # After one round the worse side looks better; after nine those who got there show that it is not.
        further = number % 3 == 0
        loss = abs(x - 0.2) + 5.0 if further else abs(x - 0.8)
        known.append(
            Outcome(number=number, values={"x": x}, status="paused", rounds=9 if further else 1, metrics={"loss": loss})
        )
    best_further = [one for one in known if one.rounds == 9]
    standings = Standings(terms.objectives, (), levels=(1, 3, 9))
    ordered = scores({one.number: s for one in known if (s := standings.of(one)) is not None})
    assert max(ordered[one.number] for one in best_further) < min(
        ordered[one.number] for one in known if one.rounds == 1
    )
    proposer = make_proposer(terms, 0, Path())
    proposer.tell(known)
    assert len(list(proposer.ask(3))) == 3


def test_a_promoted_trial_that_runs_again_still_counts_as_good() -> None:
    terms = terms_of("tpe", {"x": "0.0..1.0"})
    known = [
        Outcome(
            number=n, values={"x": n / 40}, status="running" if n < 4 else "paused", rounds=3 if n < 4 else 1,
            metrics={"loss": n / 40},
        )
        for n in range(40)
    ]  # fmt: skip
    proposer = make_proposer(terms, 0, Path())
    proposer.tell(known)
    points = [point.values["x"] for point in proposer.ask(10)]  # type: ignore[attr-defined]
    assert sorted(points)[5] < 0.3


@pytest.mark.parametrize("name", ["tpe", "gp", "nsga-ii"])
def test_several_objectives_and_limits_are_learnt(name: str) -> None:
    terms = terms_of(name, metric=("loss", "max accuracy"), scheduler="asha", limits=("latency <= 1.0",))
    known = []
    for number in range(24):
        values = {"x": uniform("multi", number, 0), "y": uniform("multi", number, 1)}
        metrics = {"loss": values["x"], "accuracy": 1.0 - values["x"], "latency": 2.0 * values["y"]}
        known.append(Outcome(number=number, values=values, status="paused", rounds=1, metrics=metrics))  # type: ignore[arg-type]
    known.append(Outcome(number=24, values={"x": 0.1, "y": 0.1}, status="diverged", rounds=1, metrics={"loss": 1.0}))
    points = next_points(terms, known, 3 if name == "gp" else 12)
    assert sum(point["x"] < 0.5 for point in points) > 0.6 * len(points), "both objectives are better at small x"


@pytest.mark.parametrize("name", LEARNING)
def test_before_there_are_results_points_are_random_and_called_so(name: str) -> None:
    proposer = make_proposer(terms_of(name), 0, Path())
    proposer.tell([Outcome(number=0, values={"x": 0.5, "y": 0.5}, status="running")])
    points = list(proposer.ask(3))
    assert [point.by for point in points] == ["random"] * 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", LEARNING)
def test_trials_of_another_space_are_passed_over(name: str) -> None:
    """A study was widened and narrowed: some trials lie outside of what it is now."""
    terms = terms_of(name)
    known = [
        *first_outcomes(terms, 12, bowl),
        Outcome(number=12, values={"x": 7.0, "y": 0.5}, status="finished", rounds=9, metrics={"loss": -9.0}),
        Outcome(number=13, values={"z": 0.5}, status="finished", rounds=9, metrics={"loss": -9.0}),
    ]
    proposer = make_proposer(terms, 0, Path())
    proposer.tell(known)
    for point in proposer.ask(3):
        terms.parsed_space.complete(point.values)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", LEARNING)
def test_what_is_forgotten_is_not_learnt_from(name: str) -> None:
    terms = terms_of(name)
    known = first_outcomes(terms, 30, bowl)
    one, another = make_proposer(terms, 0, Path()), make_proposer(terms, 0, Path())
    one.tell(known)
    one.forget(range(10))  # type: ignore[attr-defined]
    another.tell(known[10:])
    assert list(one.ask(2)) == list(another.ask(2))


def test_an_answer_out_of_a_full_window_takes_milliseconds() -> None:
    terms = terms_of("tpe", {f"p{n}": "0.0..1.0" for n in range(8)})
    proposer = make_proposer(terms, 0, Path())
    proposer.tell(first_outcomes(terms, NUM_NEWEST + WINDOW_STEP + NUM_BEST, bowl))
    proposer.ask(1)
    times = []
    for _ in range(5):
        begun_s = time.perf_counter()
        proposer.ask(1)
        times.append(time.perf_counter() - begun_s)
    assert sorted(times)[2] < 0.1, f"{sorted(times)} s"


def test_trials_between_two_levels_count_as_equally_far() -> None:
    standings = Standings(terms_of("tpe").objectives, (), levels=(1, 3, 9))
    kinds = [
        standings.of(Outcome(number=0, values={}, status="paused", rounds=rounds, metrics={"loss": 1.0}))
        for rounds in (1, 2, 3, 8, 9, 40)
    ]
    assert kinds == [(-1.0, 1.0), (-1.0, 1.0), (-3.0, 1.0), (-3.0, 1.0), (-9.0, 1.0), (-9.0, 1.0)]
    without = Standings(terms_of("tpe").objectives, ())
    early, late = (
        without.of(Outcome(number=0, values={}, status="finished", rounds=rounds, metrics={"loss": 1.0}))
        for rounds in (5, 50)
    )
    assert early == late == (-math.inf, 1.0)


def test_scores_are_the_values_where_all_went_equally_far_and_ranks_where_not() -> None:
    assert scores({0: (-3.0, 0.5), 1: (-3.0, 0.7), 2: (2.0, math.inf)}) == {0: 0.5, 1: 0.7, 2: 0.7}
    mixed = scores({0: (-3.0, 5.0), 1: (-1.0, 0.1), 2: (-1.0, 0.1), 3: (2.0, math.inf)})
    assert mixed[0] < mixed[1] == mixed[2] < mixed[3] and all(map(math.isfinite, mixed.values()))
