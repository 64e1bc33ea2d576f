"""Workers on several machines: TCP between those on different ones, shared memory between others, and equal bits."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_cluster import Fault, TinyCluster, every_micro_shard_counted_once

UNTIL = 20
Make = Callable[..., TinyCluster]


@pytest.mark.parametrize("nodes", ["ab", "abc", "aabbc", "abababa"])
def test_any_mix_of_machines_gives_the_bits_of_one_worker(
    cluster: Make, home: Path, undisturbed: str, nodes: str
) -> None:
    workers = cluster(nodes=nodes)
    workers.run(len(nodes))
    assert workers.outcomes == ["finished"] * len(nodes), workers.story()
    assert workers.hashes() == {undisturbed}
    every_micro_shard_counted_once(home, UNTIL)


POINTS = ["computing", "contributed", "summing", "summed", "applying", "applied"]


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_of_a_step_leaves_no_mark_across_machines(
    cluster: Make, home: Path, undisturbed: str, point: str
) -> None:
    """pytorch#67742: the death of rank 0's machine took everybody along."""
    workers = cluster(faults=((0, point, 7),), nodes="abc")
    workers.run(3)
    assert sorted(workers.outcomes) == ["SIGKILL", "finished", "finished"], workers.story()
    assert workers.hashes() == {undisturbed}
    every_micro_shard_counted_once(home, UNTIL)


@pytest.mark.parametrize(
    "faults",
    [
        ((0, "summed", 5), (1, "took-gradient", 5)),
        ((0, "applied", 6), (1, "summing", 5), (2, "declared", 5)),
        ((3, "computing", 3), (0, "offered-state", 3)),
        ((3, "computing", 3), (4, "got-state", 3)),
        ((0, "parting", 20), (1, "parting", 20)),
    ],
    ids=str,
)
def test_deaths_during_the_repair_of_others_leave_no_mark_across_machines(
    cluster: Make, home: Path, undisturbed: str, faults: tuple[Fault, ...]
) -> None:
    workers = cluster(faults=faults, replace=True, nodes="abac")
    workers.run(4)
    assert "finished" in workers.outcomes, workers.story()
    assert set(workers.outcomes) <= {"finished", "SIGKILL"}, workers.story()
    assert workers.hashes() == {undisturbed}
    every_micro_shard_counted_once(home, UNTIL)
