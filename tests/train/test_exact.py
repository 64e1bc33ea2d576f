"""One model whoever computes it: equal bits on any number of workers, through deaths and joins at any point."""

from collections.abc import Callable
from pathlib import Path

import pytest
from programs import everything
from tiny_cluster import Fault, TinyCluster, every_micro_shard_counted_once

UNTIL = 20
Make = Callable[..., TinyCluster]


@pytest.mark.parametrize("num_workers", [2, 3, 5, 7])
def test_any_number_of_workers_gives_the_bits_of_one(
    cluster: Make, home: Path, undisturbed: str, num_workers: int
) -> None:
    workers = cluster()
    workers.run(num_workers)
    assert workers.outcomes == ["finished"] * num_workers, workers.story()
    assert workers.hashes() == {undisturbed}
    every_micro_shard_counted_once(home, UNTIL)


def test_with_no_word_on_micro_shards_up_to_four_workers_give_equal_bits_too(home: Path) -> None:
    hashes = set()
    for num_workers in (1, 3):
        workers = TinyCluster(home / str(num_workers), everything, {"micro_shards": None}, most=num_workers)
        workers.run(num_workers)
        assert workers.outcomes == ["finished"] * num_workers, workers.story()
        hashes |= workers.hashes()
        assert not any("micro-shards" in child.error for child in workers.children.values())
        workers.close()
    assert len(hashes) == 1


def test_a_default_that_more_workers_need_is_said_once(cluster: Make) -> None:
    workers = cluster({"micro_shards": None, "until": 2}, most=5)
    workers.run(2)
    said = "".join(child.error for child in workers.children.values())
    assert said.count("16 micro-shards, for up to 8 workers") == 1, workers.story()
    assert "micro_shards=16" in said


def test_another_seed_gives_another_model(cluster: Make, undisturbed: str) -> None:
    workers = cluster({"seed": 1})
    workers.run(2)
    assert len(workers.hashes()) == 1
    assert undisturbed not in workers.hashes()


POINTS = [
    "computing",
    "contributed",
    "summing",
    "summed",
    "applying",
    "applied",
]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_of_a_step_leaves_no_mark(
    cluster: Make, home: Path, undisturbed: str, point: str, victim: int
) -> None:
    """torchft: a peer killed during the reduction crashed the survivors; torchft#63: a dead member was never forgotten;
    pytorch#67742: the death of the rendezvous' host (rank 0 here) took everybody along."""
    workers = cluster(faults=((victim, point, 7),))
    workers.run(3)
    assert sorted(workers.outcomes) == ["SIGKILL", "finished", "finished"], workers.story()
    assert workers.hashes() == {undisturbed}
    every_micro_shard_counted_once(home, UNTIL)


@pytest.mark.parametrize(
    "faults",
    [
        ((0, "summed", 5), (1, "declared", 5)),
        ((0, "summed", 5), (1, "took-gradient", 5)),
        ((0, "contributed", 5), (1, "contributed", 5)),
        ((0, "applied", 6), (1, "summing", 5), (2, "declared", 5)),
        ((2, "computing", 3), (1, "computing", 9), (0, "computing", 15)),
        ((3, "computing", 3), (0, "offered-state", 3)),
        ((3, "computing", 3), (4, "got-state", 3)),
        ((0, "parting", 20), (1, "parting", 20)),
        ((0, "saving", 20),),
    ],
    ids=str,
)
def test_deaths_during_the_repair_of_others_leave_no_mark(
    cluster: Make, home: Path, undisturbed: str, faults: tuple[Fault, ...]
) -> None:
    workers = cluster(faults=faults, replace=True)
    workers.run(4)
    assert "finished" in workers.outcomes, workers.story()
    assert set(workers.outcomes) <= {"finished", "SIGKILL"}, workers.story()
    assert workers.hashes() == {undisturbed}
    every_micro_shard_counted_once(home, UNTIL)
    assert (home / f"outputs/checkpoints/step-{UNTIL}").is_dir()


def test_joins_and_releases_leave_no_mark(cluster: Make, home: Path, undisturbed: str) -> None:
    """torchft#309: a joiner one batch behind hung; dlrover#1534: scaling up got stuck; horovod#3399: a graceful leaving
    made samples repeat."""
    workers = cluster({"pause_s": 0.01})
    workers.start(1)
    workers.pump(lambda: workers.committed >= 3)
    workers.start(2)
    workers.pump(lambda: len(workers.generations[-1].members) == 3 and workers.committed >= 8)
    workers.release(0)
    workers.pump(lambda: workers.committed >= 12)
    workers.start(1)
    workers.finish()
    assert workers.outcomes == ["released", "finished", "finished", "finished"], workers.story()
    assert workers.hashes() == {undisturbed}
    every_micro_shard_counted_once(home, UNTIL)
