"""Many deaths, joins and releases at seeded moments: still one model. A failing seed prints the run's story."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_cluster import TinyCluster, every_micro_shard_counted_once

from racimo.spec.run import CheckpointSpec

UNTIL = 60
POINTS = ("computing", "contributed", "summing", "summed", "applying", "applied", "declared", "took-gradient",
          "offered-state", "got-state")  # fmt: skip
MOST_WORKERS = 6
Make = Callable[..., TinyCluster]


def seeded_faults(rng: random.Random) -> tuple[tuple[int, str, int], ...]:
    """Two of three workers die at some point of the protocol, at some step, however late they were started."""
    return tuple((index, rng.choice(POINTS), rng.randrange(UNTIL)) for index in range(60) if rng.random() < 2 / 3)


def drive(workers: TinyCluster, rng: random.Random) -> None:
    """Starts, kills and releases workers as training goes on; when all are dead, another attempt is due."""
    workers.start(rng.randint(1, 3))
    changes = 0
    while workers.live:
        wait_for_something(workers, workers.committed + rng.randint(1, 6), len(workers.outcomes))
        if not workers.live or "finished" in workers.outcomes or changes >= 12:
            break
        changes += 1
        members = [child.index for child in workers.live if child.ready is not None and not child.released]
        choice = rng.random()
        if choice < 0.5 and len(workers.live) < MOST_WORKERS:
            workers.start(1)
        elif choice < 0.7 and len(members) > 1:
            workers.release(rng.choice(members))
        elif choice < 0.8 and members:
            workers.kill(rng.choice(members))
    workers.finish()


def wait_for_something(workers: TinyCluster, step: int, num_ended: int) -> None:
    workers.pump(lambda: workers.committed >= step or len(workers.outcomes) > num_ended)


def survive(cluster: Make, home: Path, seed: int, until: int, nodes: str = "") -> set[str]:
    rng = random.Random(seed)
    number = 1
    for attempt in range(1, 20):
        workers = cluster(
            {"until": until, "pause_s": 0.002},
            attempt=attempt,
            first_generation=number,
            faults=seeded_faults(rng) if attempt < 6 else (),
            checkpoint=CheckpointSpec(every="10 steps"),
            nodes=nodes,
        )
        drive(workers, rng)
        number = workers.next_generation
        allowed = {"finished", "SIGKILL", "released"}
        assert set(workers.outcomes) <= allowed, f"seed {seed}\n{workers.story()}"
        if "finished" in workers.outcomes:
            every_micro_shard_counted_once(home, until)
            return workers.hashes()
    raise AssertionError(f"seed {seed} never finished")


@pytest.fixture(scope="module")
def undisturbed_long(tmp_path_factory: pytest.TempPathFactory) -> str:
    from programs import everything

    one = TinyCluster(tmp_path_factory.mktemp("one"), everything, {"until": UNTIL})
    one.run(1)
    (digest,) = one.hashes()
    one.close()
    return digest


@pytest.mark.parametrize("seed", range(4))
def test_a_seeded_storm_leaves_no_mark(cluster: Make, home: Path, undisturbed_long: str, seed: int) -> None:
    assert survive(cluster, home, seed, UNTIL) == {undisturbed_long}, f"seed {seed}"


@pytest.mark.parametrize(("seed", "nodes"), [(10, "abc"), (11, "aab"), (12, "ababa")])
def test_a_storm_over_several_machines_leaves_no_mark(
    cluster: Make, home: Path, undisturbed_long: str, seed: int, nodes: str
) -> None:
    assert survive(cluster, home, seed, UNTIL, nodes) == {undisturbed_long}, f"seed {seed}"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 160))
def test_sixty_seeded_storms_leave_no_mark(cluster: Make, home: Path, undisturbed_long: str, seed: int) -> None:
    nodes = ("", "ab", "aabc", "abcdefg")[seed % 4]
    assert survive(cluster, home, seed, UNTIL, nodes) == {undisturbed_long}, f"seed {seed}"
