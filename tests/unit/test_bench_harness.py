"""The arithmetic behind every published number."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS
from bench.commits import Commit, first_commits, new_step_after_s, read_commits, redone_steps, step_times_s
from bench.harness import Deadline, Goal, alternate, percentile, ratios, row, spread, write_rows


def commits(*pairs: tuple[int, float], worker: str = "a", pid: int = 1) -> list[Commit]:
    return [Commit(step=step, t=t, worker=worker, pid=pid) for step, t in pairs]


def test_a_percentile_is_linear_between_ranks() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([10, 20], 75) == 17.5
    assert percentile([7], 99) == 7
    assert percentile([1, 2, 3], 0) == 1
    assert percentile([1, 2, 3], 100) == 3


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="0 values"):
        percentile([], 50)


def test_a_spread_is_in_order() -> None:
    found = spread([5, 1, 4, 2, 3])
    assert (found.n, found.min, found.p25, found.median, found.p75, found.max) == (5, 1, 2, 3, 4, 5)


def test_ratios_pair_neighbouring_rounds_and_not_medians() -> None:
    """Both double from round to round as the machine slows: the ratio is the same in every round."""
    assert ratios([1, 2, 4], [2, 4, 8]) == [0.5, 0.5, 0.5]
    assert ratios([1, 2], [2]) == [0.5]


def test_cases_alternate_in_a_seeded_order_and_each_runs_once_a_round() -> None:
    order: list[str] = []

    def case(name: str) -> Callable[[], float]:
        def measure() -> float:
            order.append(name)
            return len(order)

        return measure

    measured = alternate({name: case(name) for name in "abc"}, rounds=4, deadline=Deadline(60), seed=3)
    assert all(len(values) == 4 for values in measured.values())
    rounds = ["".join(order[at : at + 3]) for at in range(0, 12, 3)]
    assert all(sorted(one) == list("abc") for one in rounds)
    assert len(set(rounds)) > 1


def test_the_first_round_is_finished_even_without_time_and_no_second_begins() -> None:
    measured = alternate({"a": lambda: 1.0, "b": lambda: 2.0}, rounds=9, deadline=Deadline(0))
    assert measured == {"a": [1.0], "b": [2.0]}


@pytest.mark.parametrize(("how", "than", "good", "bad"), [("<=", 2, 2, 2.1), (">=", 2, 2, 1.9), ("<", 2, 1, 2)])
def test_a_goal_knows_its_edge(how: str, than: float, good: float, bad: float) -> None:
    goal = Goal(how, than)  # type: ignore[arg-type]
    assert goal.met(good)
    assert not goal.met(bad)


def test_a_row_of_several_values_is_judged_by_its_median() -> None:
    one = row("speed", [1.0, 3.0, 2.0], "x", Goal(">=", 2), peers={"other": [4.0, 6.0]})
    assert (one.value, one.met, one.goal) == (2.0, True, ">= 2")
    assert one.spread == spread([1.0, 3.0, 2.0])
    assert one.peers["other"].median == 5.0


def test_a_result_is_a_list_of_rows_and_a_quick_one_lies_beside_it(tmp_path: Path) -> None:
    rows = [row("speed", 2.0, "x", Goal(">=", 3))]
    path = write_rows("step", rows, {"cores": 2}, folder=tmp_path)
    assert path.name == "step.json"
    (found,) = json.loads(path.read_bytes())
    assert {"metric", "value", "unit", "goal", "met", "peers"} <= set(found)
    assert found["met"] is False
    assert found["meta"] == {"cores": 2}
    assert write_rows("step", rows, {"quick": True}, folder=tmp_path).name == "step.quick.json"


def test_the_time_of_a_step_is_that_of_its_first_commit() -> None:
    both = commits((1, 1.0), (2, 2.0), (3, 3.5)) + commits((1, 1.2), (2, 1.8), (3, 3.6), worker="b")
    assert first_commits(both) == {1: 1.0, 2: 1.8, 3: 3.5}
    assert step_times_s(both, skip=0) == pytest.approx([0.8, 1.7])
    assert step_times_s(both, skip=1) == pytest.approx([1.7])


def test_recovery_counts_until_a_step_that_is_new_not_until_one_done_again() -> None:
    """Killed at 2.5 with steps 1 and 2 done; a peer starts again at step 1 and is at 3 only at 9.0."""
    before = commits((1, 1.0), (2, 2.0))
    again = commits((1, 7.0), (2, 8.0), (3, 9.0), pid=2)
    assert new_step_after_s(before, 2.5) is None
    assert new_step_after_s(before + again, 2.5) == 6.5


def test_redone_steps_are_those_that_more_processes_applied_than_there_are() -> None:
    first = commits((1, 1.0), (2, 2.0), pid=1) + commits((1, 1.0), (2, 2.0), pid=2, worker="b")
    assert redone_steps(first, workers=2) == 0
    assert redone_steps(first + commits((2, 5.0), (3, 6.0), pid=3, worker="c"), workers=2) == 1


def test_a_line_that_a_killed_worker_left_torn_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 1, "t": 1.5, "shards": [0, 1], "generation": 1, "loss": 2.0}\n{"step": 2, "t"')
    (found,) = read_commits([path])
    assert (found.step, found.t, found.shards, found.worker) == (1, 1.5, (0, 1), str(tmp_path))


def test_every_benchmark_can_be_loaded() -> None:
    for name in BENCHMARKS:
        assert callable(importlib.import_module(f"bench.{name.replace('-', '_')}").run), name
