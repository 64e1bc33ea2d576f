"""Joining: the others go on meanwhile, and whoever joins replays what it missed before it is counted on."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import data
from tiny_cluster import TinyCluster, committed_lines, every_micro_shard_counted_once

import racimo
from racimo.agent.protocol import Member, NewGeneration
from racimo.worker.train import trail
from racimo.worker.train.buffers import Store
from racimo.worker.train.exchange import entering
from racimo.worker.train.mesh import Mesh
from racimo.worker.train.messages import Contribution, Reduced

Make = Callable[..., TinyCluster]


class Slow:
    """A part of the state that takes long to load."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        time.sleep(0.6)


def heavy(config: dict[str, Any]) -> None:
    """A schedule that must be replayed step by step, and a state that is slow to load."""
    for name, value in config.get("bounds", {}).items():
        setattr(trail, name, value)
    run = racimo.current_run()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    state: dict[str, Any] = {"schedule": schedule, "slow": Slow()}
    seen = []
    for step in run.steps(
        model, optimizer, racimo.Batches(data(), 32, micro_shards=8), until=config.get("until", 40), state=state
    ):
        for x, y in step:
            time.sleep(0.004)
            step.backward(torch.nn.functional.cross_entropy(model(x), y))
        seen.append(step.loss)
        if config["index"]:
            time.sleep(config.get("replay_s", 0.0))
        step.apply()
        schedule.step()
    digest = racimo.hash_state(model, optimizer, {"schedule": schedule})
    Path(run.output_dir, f"hash-{run.attempt}-{config['index']}.txt").write_text(digest)


@pytest.mark.parametrize("nodes", ["", "ab"])
def test_the_others_commit_while_one_that_joins_loads_its_state(cluster: Make, home: Path, nodes: str) -> None:
    workers = cluster(program=heavy, nodes=nodes)
    workers.start(1)
    workers.pump(lambda: workers.committed >= 3)
    workers.start(1)
    newcomer = workers.children[1]
    workers.pump(lambda: newcomer.ready is not None)
    assert newcomer.ready is not None and not newcomer.ready.holds
    workers.finish()
    assert workers.outcomes == ["finished"] * 2, workers.story()
    assert all(child.ready is not None and child.ready.holds for child in workers.children.values())
    assert len(workers.hashes()) == 1
    every_micro_shard_counted_once(home, 40)
    joined_in = next(g.number for g in workers.generations if len(g.members) == 2)
    lines = [line for line in committed_lines(home) if line["generation"] == joined_in]
    alone = {line["step"] for line in lines if not line["contributions"].get("1")}
    together = {line["step"] for line in lines if line["contributions"].get("1")}
    assert len(alone) > 3, "the others waited"
    assert together and min(together) > max(alone), "it was not counted on once it had caught up"
    replayed = {line["step"] for line in lines if line["shards"] == []}
    assert replayed, "it replayed nothing"


@pytest.mark.parametrize(
    ("nodes", "bounds"),
    [("", {"MAX_BACKLOG_BYTES": 1000}), ("ab", {"MAX_BACKLOG_BYTES": 1000}), ("ab", {"MAX_QUEUED_BYTES": -1})],
    ids=str,
)
def test_one_that_loses_the_thread_is_given_the_state_anew_and_at_last_waited_for(
    cluster: Make, home: Path, nodes: str, bounds: dict[str, int]
) -> None:
    """The bound on stored gradients is less than what comes while the state is loaded; or each is left out, also after
    the one that trails has said that it is near."""
    workers = cluster({"bounds": bounds, "until": 90}, program=heavy, nodes=nodes)
    workers.start(1)
    workers.pump(lambda: workers.committed >= 3)
    workers.start(1)
    workers.finish()
    assert workers.outcomes == ["finished"] * 2, workers.story()
    assert len(workers.hashes()) == 1
    every_micro_shard_counted_once(home, 90)
    assert any(line["contributions"].get("1") for line in committed_lines(home)), "it never came to be counted on"


def test_a_gradient_that_was_left_out_on_a_slow_way_is_known_to_be_missing() -> None:
    backlog = trail.Backlog(Store([torch.nn.Parameter(torch.zeros(4))], 2))
    backlog.put(0, Reduced(step=6, position=0, num_parts=0), None)
    assert backlog.newest(4) == 6
    assert backlog.lacks(5, (0,)) and not backlog.whole(6)


def test_one_that_is_near_is_not_counted_on_if_somebody_left_a_gradient_out_for_it() -> None:
    members = tuple(Member(worker=f"r/1/{index}", address="unix:/w") for index in range(4))
    mesh = Mesh(NewGeneration(attempt=1, number=1, members=members, reason=""), "r/1/0")
    mesh.active = (0, 1)
    given = {
        0: Contribution(step=9, holdings=(), active=(0, 1), enters={2: 8, 3: 8}, left_out={3: 8}),
        1: Contribution(step=9, holdings=(), active=(0, 1), left_out={2: 9}),
    }
    assert entering(given, mesh) == (3,)


@pytest.mark.parametrize("nodes", ["", "aab"])
@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)], ids=str)
def test_a_death_while_one_trails_leaves_no_mark(
    cluster: Make, home: Path, nodes: str, victims: tuple[int, ...]
) -> None:
    """Also of all whom it followed: it goes on from what it has, or from the beginning if it had no state yet."""
    workers = cluster({"replay_s": 0.02}, program=heavy, nodes=nodes)
    workers.start(2)
    workers.pump(lambda: workers.committed >= 3)
    (joiner,) = workers.start(1)
    workers.pump(lambda: bool(replayed(home, joiner)), wake_s=0.02)
    for victim in victims:
        workers.kill(victim)
    workers.finish()
    assert workers.outcomes.count("finished") == 3 - len(victims), workers.story()
    assert len(workers.hashes()) == 1
    every_micro_shard_counted_once(home, 40)


def replayed(home: Path, index: int) -> str:
    file = home / f"workers/1/{index}/steps.jsonl"
    return file.read_text() if file.exists() else ""


def test_one_that_is_released_before_it_ever_was_a_member_leaves(cluster: Make) -> None:
    """It waited for ever for a generation with it, and the run with it."""
    workers = cluster(program=heavy)
    workers.start(1)
    workers.pump(lambda: workers.committed >= 3)
    workers.hold_announcements(True)
    (late,) = workers.start(1)
    workers.pump(lambda: workers.children[late].ready is not None)
    workers.release(late)
    workers.hold_announcements(False)
    workers.finish()
    assert workers.outcomes == ["finished", "released"], workers.story()
