"""The loop as users write it: what it refuses, what it allows, and what it says."""

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import data, everything
from tiny_cluster import TinyCluster, committed_lines, every_micro_shard_counted_once

import racimo
from racimo.spec.run import CheckpointSpec

Make = Callable[..., TinyCluster]


def train_until(config: dict[str, Any], after_step: Callable[[Any], None], until: int = 20) -> None:
    run = racimo.current_run()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = racimo.Batches(data(), global_batch_size=32, micro_shards=8)
    for step in run.steps(model, optimizer, batches, until=until, check_every=config.get("check_every", 5)):
        for x, y in step:
            step.backward(torch.nn.functional.cross_entropy(model(x), y))
        step.apply()
        after_step((step, model))
        if config.get("stop_at") == step.number:
            break


@pytest.mark.parametrize(("where", "phase"), [("before", "compute"), ("between", "apply"), ("after", "apply")])
def test_who_is_stuck_in_the_users_code_is_in_no_phase_of_waiting(cluster: Make, where: str, phase: str) -> None:
    def stuck(config: dict[str, Any]) -> None:
        def reach(place: str) -> None:
            if place == where and config["index"] == 1:
                threading.Event().wait()

        run = racimo.current_run()
        model = torch.nn.Linear(8, 3)
        batches = racimo.Batches(data(), global_batch_size=32)
        for step in run.steps(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, until=20):
            reach("before")
            for x, y in step:
                step.backward(torch.nn.functional.cross_entropy(model(x), y))
            reach("between")
            step.apply()
            reach("after")

    workers = cluster(program=stuck)
    workers.start(2)

    def others_wait() -> bool:
        free, held = (workers.children[index].progress for index in (0, 1))
        return bool(free and free.waits_for == (1,) and held and held.phase == phase and not held.waits_for)

    workers.pump(others_wait, timeout_s=20)


class Walked(Exception):
    pass


def test_one_worker_walking_away_is_an_error_that_names_rank_and_step(cluster: Make) -> None:
    def one_returns(config: dict[str, Any]) -> None:
        def walk(reached: Any) -> None:
            if reached[0].number == 3 and config["index"] == 1:
                raise Walked

        try:
            train_until(config, walk)
        except Walked:
            return

    workers = cluster(program=one_returns)
    workers.run(3)
    assert [child.outcome for child in workers.children.values()] == [
        "worker-left-early",
        "finished",
        "worker-left-early",
    ]
    assert "rank 1 (run/1/1) left its loop over run.steps after step 3" in workers.children[0].error


def test_all_may_break_at_the_same_step(cluster: Make, home: Path) -> None:
    workers = cluster({"stop_at": 4}, program=lambda config: train_until(config, lambda _: None))
    workers.run(3)
    assert workers.outcomes == ["finished"] * 3, workers.story()
    assert max(line["step"] for line in committed_lines(home)) == 4


def test_the_error_of_one_worker_ends_the_others_within_the_grace(cluster: Make) -> None:
    def one_raises(config: dict[str, Any]) -> None:
        def fail(reached: Any) -> None:
            if reached[0].number == 3 and config["index"] == 0:
                raise ValueError("bad luck")

        train_until(config, fail)

    workers = cluster(program=one_raises)
    workers.run(2, timeout_s=20)
    assert workers.children[0].outcome == "worker-raised"
    assert workers.children[1].outcome == "worker-left-early"


def test_a_model_changed_on_one_worker_is_found_out(cluster: Make) -> None:
    def tampered(config: dict[str, Any]) -> None:
        def tamper(reached: Any) -> None:
            if reached[0].number == 7 and config["index"] == 2:
                with torch.no_grad():
                    reached[1].weight[0, 0] += 1e-3

        train_until(config, tamper)

    workers = cluster(program=tampered)
    workers.run(3)
    assert set(workers.outcomes) == {"workers-diverged"}, workers.story()
    assert "after step 10 the parameters of rank 2 (run/1/2) differ" in workers.children[0].error


def tampering(at_step: int) -> Callable[[dict[str, Any]], None]:
    """The model is changed on worker 2 after this step."""

    def tampered(config: dict[str, Any]) -> None:
        def tamper(reached: Any) -> None:
            if reached[0].number == at_step and config["index"] == 2:
                with torch.no_grad():
                    reached[1].weight[0, 0] += 1e-3

        train_until(config, tamper)

    return tampered


@pytest.mark.parametrize(("at_step", "found_at"), [(7, 10), (12, 20), (20, 20)])
def test_a_model_that_differs_gets_into_no_checkpoint(cluster: Make, home: Path, at_step: int, found_at: int) -> None:
    """Also in a run shorter than `check_every`, and by the last of all steps."""
    spec = CheckpointSpec(every="10 steps", keep=9)
    workers = cluster({"check_every": 50}, program=tampering(at_step), checkpoint=spec)
    workers.run(3)
    assert set(workers.outcomes) == {"workers-diverged"}, workers.story()
    assert f"after step {found_at} the parameters of rank 2 (run/1/2) differ" in workers.children[0].error
    kept = [path.name for path in (home / "outputs/checkpoints").glob("*")]
    assert kept == (["step-10"] if found_at > 10 else [])


def test_never_comparing_can_be_asked_for(cluster: Make) -> None:
    workers = cluster({"check_every": 0}, program=tampering(7))
    workers.run(3)
    assert workers.outcomes == ["finished"] * 3, workers.story()


def test_a_schedule_forgotten_in_the_state_shows_when_a_worker_joins(cluster: Make) -> None:
    def forgetful(config: dict[str, Any]) -> None:
        run = racimo.current_run()
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in run.steps(model, optimizer, racimo.Batches(data(), 32, micro_shards=8), until=20):
            for x, y in step:
                time.sleep(0.01)
                step.backward(torch.nn.functional.cross_entropy(model(x), y))
            step.apply()
            schedule.step()

    workers = cluster(program=forgetful)
    workers.start(1)
    workers.pump(lambda: workers.committed >= 4)
    workers.start(1)
    workers.finish()
    assert workers.outcomes == ["workers-diverged"] * 2, workers.story()
    assert "missing in run.steps(..., state={...})" in workers.children[0].error


def test_a_buffer_that_differs_is_found_out(cluster: Make) -> None:
    def tampered(config: dict[str, Any]) -> None:
        run = racimo.current_run()
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 3)
        model.register_buffer("scale", torch.ones(()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in run.steps(model, optimizer, racimo.Batches(data(), 32, micro_shards=8), until=6):
            for x, y in step:
                step.backward(torch.nn.functional.cross_entropy(model(x) * model.scale, y))
            step.apply()
            if step.number == 6 and run.rank == 1:
                model.scale += 1.0

    workers = cluster(program=tampered)
    workers.run(2)
    assert workers.outcomes == ["workers-diverged"] * 2, workers.story()


def test_who_ends_inside_the_loop_without_a_word_leaves_a_trace(cluster: Make, home: Path) -> None:
    """`os._exit(0)` in a worker was taken for a worker that has finished."""

    def abrupt(config: dict[str, Any]) -> None:
        def leave(reached: Any) -> None:
            if reached[0].number == 3 and config["index"] == 1:
                (home / "workers/1/1/outcome").write_text("none")
                os._exit(0)

        train_until(config, leave)

    workers = cluster(program=abrupt)
    workers.run(2)
    assert [(home / "workers/1" / index / "in-steps").exists() for index in "01"] == [False, True]


def test_a_worker_of_another_numerics_class_is_refused_with_both(cluster: Make) -> None:
    def other_threads(config: dict[str, Any]) -> None:
        if config["index"] == 1:
            torch.set_num_threads(2)
        everything(config)

    workers = cluster(program=other_threads)
    workers.run(2)
    assert workers.children[0].outcome == "finished", workers.story()
    assert workers.children[1].outcome == "numerics-class"
    assert "threads=2" in workers.children[1].error
    assert "threads=1" in workers.children[1].error


def test_reports_from_some_workers_only_hang_nobody(cluster: Make) -> None:
    """ray#58870: reporting on some workers only hung a reader, and unequal numbers hung all."""

    def uneven(config: dict[str, Any]) -> None:
        def report(reached: Any) -> None:
            if config["index"] == 1 and reached[0].number % 3 == 0:
                racimo.current_run().report(loss=reached[0].loss)

        train_until(config, report)

    workers = cluster(program=uneven)
    workers.run(2)
    assert workers.outcomes == ["finished"] * 2, workers.story()
    assert [report.step for report in workers.reports] == [3, 6, 9, 12, 15, 18]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_fast_counts_every_sample_once_through_a_death(cluster: Make, home: Path, num_workers: int) -> None:
    faults = ((1, "contributed", 6),) if num_workers > 1 else ()
    workers = cluster({"coherence": "fast"}, faults=faults)
    workers.run(num_workers)
    assert workers.outcomes.count("finished") == max(num_workers - 1, 1), workers.story()
    assert len(workers.hashes()) == 1
    every_micro_shard_counted_once(home, 20)


class Recording(torch.utils.data.Dataset[Any]):
    """Leaves a file named after each process that reads it."""

    def __init__(self, folder: Path) -> None:
        self._data, self._folder = data(), folder

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        (self._folder / str(os.getpid())).touch()
        return self._data[index]


def test_data_loading_processes_change_nothing_and_end_with_their_worker(
    cluster: Make, home: Path, undisturbed: str
) -> None:
    folder = home / "pids"
    folder.mkdir()
    workers = cluster({"num_workers": 1, "dataset": Recording(folder)}, faults=((1, "computing", 6),))
    workers.run(2)
    assert workers.hashes() == {undisturbed}, workers.story()
    every_micro_shard_counted_once(home, 20)
    readers = {int(path.name) for path in folder.iterdir()} - {child.pid for child in workers.children.values()}
    assert len(readers) == 2
    for pid in readers:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            assert select.select([fd], [], [], 10)[0], f"data-loading process {pid} outlived its worker"
            os.close(fd)


def test_there_is_always_a_rank_zero(cluster: Make, home: Path) -> None:
    def last_word(config: dict[str, Any]) -> None:
        train_until(config, lambda _: None)
        run = racimo.current_run()
        (home / f"rank-{run.rank}-of-{run.num_workers}").touch()

    workers = cluster(program=last_word, faults=((0, "computing", 5),))
    workers.run(3)
    assert sorted(path.name for path in home.glob("rank-*")) == ["rank-0-of-2", "rank-1-of-2"], workers.story()


def test_training_goes_on_while_the_agent_is_away(cluster: Make, undisturbed: str) -> None:
    workers = cluster({"pause_s": 0.01})
    workers.start(2)
    workers.pump(lambda: workers.committed >= 3)
    workers.agent_dies()
    files = [child.folder / "steps.jsonl" for child in workers.live]
    before = [file.read_text().count("\n") for file in files]
    workers.pump(
        lambda: (
            all(file.read_text().count("\n") > n + 3 for file, n in zip(files, before, strict=True)) or not workers.live
        ),
        wake_s=0.02,
    )
    workers.agent_returns()
    workers.finish()
    assert workers.outcomes == ["finished"] * 2, workers.story()
    assert workers.hashes() == {undisturbed}
    assert {report.step for report in workers.reports} == set(range(1, 21)), "a report was lost"


def test_a_death_while_control_is_down_is_repaired_when_it_returns(cluster: Make, home: Path, undisturbed: str) -> None:
    workers = cluster({"pause_s": 0.01})
    workers.start(3)
    workers.pump(lambda: workers.committed >= 3)
    workers.hold_announcements(True)
    workers.kill(1)
    workers.pump(
        lambda: any(
            (child.progress and child.progress.waits_for) or child.progress.phase == "wait" for child in workers.live
        )
    )
    workers.hold_announcements(False)
    workers.finish()
    assert workers.hashes() == {undisturbed}, workers.story()
    every_micro_shard_counted_once(home, 20)
