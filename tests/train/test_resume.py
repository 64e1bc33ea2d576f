"""Runs that end and begin again: from checkpoints, by pausing, with other numbers of workers."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_cluster import TinyCluster, committed_lines, every_micro_shard_counted_once

from racimo.spec.run import CheckpointSpec

UNTIL = 20
Make = Callable[..., TinyCluster]
EVERY_FIVE = CheckpointSpec(every="5 steps")


def die_after(workers: TinyCluster, count: int, step: int) -> TinyCluster:
    """All workers are killed once the checkpoint of this step is complete."""
    workers.start(count)
    workers.pump(lambda: any(saved.step == step for saved in workers.saved))
    for child in workers.live:
        workers.kill(child.index)
    workers.finish()
    return workers


def resumed_after(workers: TinyCluster) -> int:
    found = re.search(r"resumes after step (\d+)", workers.children[0].error)
    assert found, workers.story()
    return int(found[1])


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 2)])
def test_when_all_die_the_next_attempt_goes_on_from_the_newest_checkpoint(
    cluster: Make, home: Path, undisturbed: str, before: int, after: int
) -> None:
    """transformers#40245: saved with one worker and resumed with two, samples were never read; accelerate#2016: the
    later epoch (a step is a quarter of one) got the first one's order; pytorch#144657: the copy held later values."""
    first = die_after(cluster({"pause_s": 0.01}, checkpoint=EVERY_FIVE), before, 10)
    second = cluster(checkpoint=EVERY_FIVE, attempt=2, first_generation=first.next_generation)
    second.run(after)
    assert second.outcomes == ["finished"] * after, second.story()
    assert resumed_after(second) in (10, 15)
    assert second.hashes() == {undisturbed}
    every_micro_shard_counted_once(home, UNTIL)
    assert sorted(path.name for path in (home / "outputs/checkpoints").iterdir()) == ["step-15", "step-20"]


def test_a_later_attempt_fences_the_earlier_ones_at_a_place_that_many_machines_see(
    cluster: Make, home: Path, undisturbed: str
) -> None:
    """Workers of a given up attempt live on where nobody hears them, until somebody can end them."""
    seen_by_all = CheckpointSpec(every="5 steps", to=str(home / "shared"))
    stray = cluster({"pause_s": 0.1}, checkpoint=seen_by_all)
    stray.start(1)
    stray.pump(lambda: any(saved.step == 5 for saved in stray.saved))
    second = cluster(checkpoint=seen_by_all, attempt=2, first_generation=stray.next_generation)
    second.run(1)
    assert second.hashes() == {undisturbed}
    (mark,) = (home / "shared").glob("*/racimo-attempt")
    assert mark.read_text() == "2"
    stray.finish()
    assert "attempt 2 of this run has begun elsewhere" in stray.children[0].error
    newest = json.loads((mark.parent / f"step-{UNTIL}" / "racimo.json").read_bytes())
    assert newest["attempt"] == 2


def test_a_torn_newest_checkpoint_is_passed_over_and_said(cluster: Make, home: Path, undisturbed: str) -> None:
    first = die_after(cluster({"pause_s": 0.02}, checkpoint=EVERY_FIVE), 1, 10)
    os.truncate(next((home / "outputs/checkpoints/step-10").glob("*.distcp")), 100)
    second = cluster(checkpoint=EVERY_FIVE, attempt=2, first_generation=first.next_generation)
    second.run(2)
    assert second.hashes() == {undisturbed}, second.story()
    assert "step-10 is torn" in second.children[0].error
    assert resumed_after(second) in (5, 15)


def test_beginning_again_at_zero_is_never_silent(cluster: Make, home: Path, undisturbed: str) -> None:
    first = cluster(faults=((0, "summed", 13),))
    first.run(1)
    second = cluster(attempt=2, first_generation=first.next_generation)
    second.run(1)
    assert second.hashes() == {undisturbed}, second.story()
    assert "starts again at step 0: 13 steps were committed" in second.children[0].error


def test_the_end_of_an_epoch_is_a_place_to_resume_from(cluster: Make, home: Path, undisturbed: str) -> None:
    """meta-pytorch/data#1437: a position saved exactly at an epoch's end gave an empty epoch. An epoch has 4 steps."""
    spec = CheckpointSpec(every="8 steps", keep=5)
    first = die_after(cluster({"pause_s": 0.01}, checkpoint=spec), 1, 8)
    second = cluster(checkpoint=spec, attempt=2, first_generation=first.next_generation)
    second.run(2)
    assert resumed_after(second) in (8, 16)
    assert second.hashes() == {undisturbed}
    every_micro_shard_counted_once(home, UNTIL)


def test_a_paused_run_goes_on_as_if_nothing_had_been(cluster: Make, home: Path, undisturbed: str) -> None:
    first = cluster({"pause_s": 0.01})
    first.start(3)
    first.pump(lambda: first.committed >= 5)
    first.pause()
    first.finish()
    assert first.outcomes == ["paused"] * 3, first.story()
    paused_at = max(line["step"] for line in committed_lines(home))
    assert 5 <= paused_at < UNTIL
    assert [saved.step for saved in first.saved] == [paused_at]
    second = cluster(attempt=2, first_generation=first.next_generation)
    second.run(2)
    assert second.hashes() == {undisturbed}, second.story()
    every_micro_shard_counted_once(home, UNTIL)


def test_a_later_run_starts_from_a_named_checkpoint(cluster: Make, home: Path, undisturbed: str) -> None:
    first = cluster({"until": 7}, checkpoint=EVERY_FIVE)
    first.run(2)
    shutil.move(home / "outputs/checkpoints", home / "kept")
    shutil.rmtree(home / "workers")
    second = cluster({"resume_from": str(home / "kept")})
    second.run(3)
    assert undisturbed in second.hashes(), second.story()
    assert "resumes after step 7" in second.children[0].error
    assert min(line["step"] for line in committed_lines(home)) == 8


def test_a_checkpoint_of_another_run_is_refused_with_both_values(cluster: Make, home: Path) -> None:
    first = cluster({"until": 3})
    first.run(1)
    shutil.move(home / "outputs/checkpoints", home / "kept")
    second = cluster({"resume_from": str(home / "kept"), "global_batch_size": 16}, attempt=2)
    second.run(1)
    assert second.outcomes == ["checkpoint-mismatch"]
    assert "global batch size 16 against 32" in second.children[0].error


def test_a_full_disk_does_not_stop_training_but_is_the_error_at_the_end(cluster: Make, home: Path) -> None:
    def no_room(config: dict[str, object]) -> None:
        from programs import everything

        from racimo.worker.train import checkpoint

        def full(_: object) -> None:
            raise OSError(28, "No space left on device")

        checkpoint._sync_folder = full  # type: ignore[assignment]
        everything(config)

    workers = cluster(program=no_room, checkpoint=EVERY_FIVE)
    workers.run(2)
    assert "disk-full" in workers.outcomes, workers.story()
    assert "step 5 could not be written, training goes on" in workers.children[0].error
    assert max(line["step"] for line in committed_lines(home)) == UNTIL
    assert list((home / "outputs/checkpoints").iterdir()) == []
