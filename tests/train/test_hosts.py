"""Workers on several machines: TCP between those on different ones, shared memory between others, and equal bits."""

import contextlib
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import everything
from tiny_cluster import Fault, TinyCluster, committed_lines, every_micro_shard_counted_once

import racimo
from racimo.spec.run import CheckpointSpec
from racimo.worker.train import faults

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


def cut_connections() -> int:
    """Ends every TCP connection of this process, as if the network had done it. How many there were."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=os.dup(int(entry.name)))
            with connection:
                if connection.family == socket.AF_INET and connection.getpeername():
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


@pytest.mark.parametrize("nodes", ["ab", "aab", "abc"])
def test_when_a_connection_breaks_and_nobody_is_lost_all_meet_again_in_the_same_generation(
    cluster: Make, home: Path, undisturbed: str, nodes: str
) -> None:
    """A cable between two machines that was out for a while, of which the control process never knew."""

    def cut(config: dict[str, Any]) -> None:
        def strike(point: str, step: int) -> None:
            if config["index"] == 0 and (point, step) in (("contributed", 5), ("summed", 9), ("applied", 13)):
                assert cut_connections(), "there was none to cut"

        faults.at = strike
        everything(config)

    workers = cluster(program=cut, nodes=nodes)
    workers.run(len(nodes))
    assert workers.outcomes == ["finished"] * len(nodes), workers.story()
    assert workers.hashes() == {undisturbed}
    assert {line["generation"] for line in committed_lines(home)} == {1}
    every_micro_shard_counted_once(home, UNTIL)


def test_who_is_gone_without_a_word_is_named_with_whether_it_can_be_reached(cluster: Make) -> None:
    """dlrover#1534, pytorch#118369: stuck for minutes, and nobody could tell on whom."""
    workers = cluster({"pause_s": 0.01}, nodes="ab")
    workers.start(2)
    workers.pump(lambda: workers.committed >= 3)
    workers.hold_announcements(True)
    workers.kill(1)

    def named() -> bool:
        progress = workers.children[0].progress
        return bool(progress and progress.waits_for == (1,) and progress.unreachable == (1,))

    workers.pump(named, timeout_s=15)
    workers.hold_announcements(False)
    workers.finish()
    assert workers.children[0].outcome == "finished", workers.story()


EVERY_FIVE = CheckpointSpec(every="5 steps")


def with_disks(config: dict[str, Any]) -> None:
    """As if each node had a disk of its own: the output folder is one per node."""
    run = racimo.current_run()
    run.output_dir = run.output_dir / config["nodes"][config["index"] % len(config["nodes"])]
    run.output_dir.mkdir(exist_ok=True)
    everything(config)


def steps_on(home: Path, node: str) -> list[str]:
    return sorted(path.name for path in (home / f"outputs/{node}/checkpoints").glob("*"))


def test_a_checkpoint_on_local_disks_is_on_two_machines(cluster: Make, home: Path) -> None:
    nodes = "aabc"
    workers = cluster({"nodes": nodes, "until": 12}, program=with_disks, nodes=nodes, checkpoint=EVERY_FIVE)
    workers.run(4)
    assert workers.outcomes == ["finished"] * 4, workers.story()
    assert "step-12" in steps_on(home, "a")
    assert "step-12" in steps_on(home, "b")
    assert steps_on(home, "c") == []


def test_a_later_attempt_begins_with_the_newest_checkpoint_that_any_of_its_machines_has(
    cluster: Make, home: Path, undisturbed: str
) -> None:
    """The machine of the first attempt's lead is lost; and of the newest checkpoint one copy is torn."""
    nodes = "ab"
    first = cluster({"nodes": nodes, "pause_s": 0.01}, program=with_disks, nodes=nodes, checkpoint=EVERY_FIVE)
    first.start(2)
    first.pump(lambda: sum(saved.step == 10 for saved in first.saved) == 2)
    for child in first.live:
        first.kill(child.index)
    first.finish()
    newest = max(steps_on(home, "b"), key=lambda name: int(name.removeprefix("step-")))
    shutil.rmtree(home / "outputs/a")
    shutil.copytree(home / "outputs/b", home / "outputs/c")
    torn = next((home / f"outputs/c/checkpoints/{newest}").glob("*.distcp"))
    torn.write_bytes(bytes(torn.stat().st_size))
    second = cluster(
        {"nodes": "cdb"},
        program=with_disks,
        nodes="cdb",
        checkpoint=EVERY_FIVE,
        attempt=2,
        first_generation=first.next_generation,
    )
    second.run(3)
    assert second.outcomes == ["finished"] * 3, second.story()
    assert f"resumes after {newest.replace('-', ' ')}," in second.children[2].error, second.story()
    assert f"{newest} is torn" in second.children[0].error
    assert {path.read_text() for path in home.glob("outputs/*/hash-2-*.txt")} == {undisturbed}
    every_micro_shard_counted_once(home, UNTIL)
