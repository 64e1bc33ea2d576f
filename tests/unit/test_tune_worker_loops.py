"""Trials that loop over `run.rounds` or `run.steps`: what is saved when, and that they go on as if undisturbed."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trial_stage import TrialStage, slice_of, told

import racimo
from racimo.agent.kept import newest_kept
from racimo.spec.errors import RacimoError
from racimo.worker.train import faults
from racimo.worker.train.crew import _left_open
from racimo.worker.train.run import Run
from racimo.worker.tune.pace import MOST_OF_TIME, Pace
from racimo.worker.tune.rounds import Rounds


@pytest.fixture
def stage(tmp_path: Path) -> TrialStage:
    return TrialStage(tmp_path)


class Killed(BaseException):
    """Stands for SIGKILL: nothing that is not on disk survives it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, point: str, rounds: int) -> None:
    def die(name: str, at: int) -> None:
        if (name, at) == (point, rounds):
            monkeypatch.setattr(faults, "at", lambda name, at: None)
            raise Killed

    monkeypatch.setattr(faults, "at", die)


def by_rounds(config: dict[str, Any]) -> None:
    """A loss that depends on all rounds before and on the random numbers of each."""
    run = racimo.current_run()
    state = {"sum": 0.0}
    for _ in run.rounds(6, state):
        state["sum"] += float(torch.rand(()))
        run.report(loss=state["sum"])


def by_steps(config: dict[str, Any]) -> None:
    run = racimo.current_run()
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.05), momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), torch.tensor(1.0)) for i in range(32)]
    batches = racimo.Batches(data, global_batch_size=16, micro_shards=4)
    for step in run.steps(model, optimizer, batches, until=6, state={"schedule": schedule}):
        for batch in step:
            step.backward((model(batch.x).squeeze(-1) - batch.y).square().mean())
        step.apply()
        run.report(loss=step.loss, lr=schedule.get_last_lr()[0])
        schedule.step()  # after the report, and yet of this step


LOOPS = pytest.mark.parametrize("function", [by_rounds, by_steps])


def losses(stage: TrialStage) -> dict[int, float]:
    """By step, as the run's files have them: the first report of each counts."""
    found: dict[int, float] = {}
    for report in stage.reports:
        found.setdefault(report.step, report.values["loss"])
    return found


@pytest.fixture
def undisturbed(tmp_path: Path) -> Iterator[TrialStage]:
    yield TrialStage(tmp_path / "undisturbed")


@LOOPS
def test_a_trial_that_was_paused_goes_on_as_if_it_never_was(
    stage: TrialStage, undisturbed: TrialStage, function: Any
) -> None:
    whole = undisturbed.call(function)
    assert told(stage.call(function, slice_of(until=2))) == {"outcome": "reached", "rounds": 2, "saved": 2}
    result = stage.call(function, slice_of(number=2, rounds=2, saved=2))
    assert told(result) == {"outcome": "finished", "rounds": 6, "saved": 6}
    assert losses(stage) == losses(undisturbed)
    assert result.curve == whole.curve[2:]
    assert len(stage.reports) == 6  # nothing was done again


@LOOPS
@pytest.mark.parametrize("point", ["reported", "kept", "written"])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_worker_that_dies_anywhere_loses_one_round_at_most(
    stage: TrialStage, undisturbed: TrialStage, function: Any, point: str, rounds: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    undisturbed.call(function)
    stage.following = [slice_of(until=n, number=n, rounds=n - 1) for n in (2, 3, 4)]
    kill_at(monkeypatch, point, rounds)
    monkeypatch.setattr(Pace, "due", True)
    with pytest.raises(Killed):
        stage.call(function, slice_of(until=1))
    stage.following = []
    before = len(stage.reports)
    stage.call(function, slice_of(number=9, rounds=0))
    assert losses(stage) == losses(undisturbed)
    assert len(stage.reports) - before <= 6 - rounds + 1


@LOOPS
def test_a_trial_whose_state_is_torn_begins_anew(stage: TrialStage, undisturbed: TrialStage, function: Any) -> None:
    undisturbed.call(function)
    stage.call(function, slice_of(until=2))
    kept = newest_kept(stage.folder / "trials" / "0")
    assert kept is not None
    kept.path.write_bytes(kept.path.read_bytes()[:20])
    assert stage.call(function, slice_of(number=2, rounds=2, saved=2)).rounds == 6
    assert losses(stage) == losses(undisturbed)


@LOOPS
def test_a_loop_is_left_between_two_rounds_when_its_worker_is_to_leave(stage: TrialStage, function: Any) -> None:
    stage.asked_to_leave = True
    assert stage.call(function).outcome == "halted"
    stage.asked_to_leave = False
    assert told(stage.call(function, slice_of(number=2))) == {"outcome": "finished", "rounds": 6, "saved": 6}


@LOOPS
def test_a_trial_keeps_one_state_however_long_it_runs(stage: TrialStage, function: Any) -> None:
    stage.call(function)
    assert [path.name.rpartition(".")[0] for path in (stage.folder / "trials" / "0").iterdir()] == ["after-6-rounds"]


def test_a_full_disk_does_not_end_a_trial(stage: TrialStage, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("racimo.worker.tune.rounds.keep", full)
    monkeypatch.setattr("racimo.worker.tune.keeper.keep", full)
    for function in (by_rounds, by_steps):
        assert told(stage.call(function, slice_of(until=2))) == {"outcome": "reached", "rounds": 2}


def test_a_clone_learns_on_from_its_parents_weights_with_its_own_settings(stage: TrialStage) -> None:
    """Population based training: what the parent learnt, and the child's learning rate on the parent's schedule."""
    stage.call(by_steps, slice_of(until=4, values={"lr": 0.1}))
    (stage.folder / "trials" / "0").rename(stage.folder / "trials" / "5")
    result = stage.call(by_steps, slice_of(trial=5, number=2, values={"lr": 0.02}))
    assert told(result) == {"outcome": "finished", "rounds": 6, "saved": 6}
    rates = [report.values["lr"] for report in stage.reports]
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.005, 0.005])
    assert result.curve[0] == (1, stage.reports[0].values["loss"])  # its parent's curve is the beginning of its own


def test_what_a_left_loop_held_is_given_back(stage: TrialStage) -> None:
    stage.call(by_steps, slice_of(until=1, trial=9))
    gc.collect()
    before = len(_left_open), len(list(Path("/proc/self/fd").iterdir()))
    for number in range(5):
        stage.call(by_steps, slice_of(until=1, trial=number, number=number + 1))
    gc.collect()
    assert (len(_left_open), len(list(Path("/proc/self/fd").iterdir()))) == before


def test_rounds_outside_a_cluster_keep_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(None)
    for _ in range(2):
        assert list(run.rounds(3)) == [1, 2, 3]
    assert not list(tmp_path.iterdir())
    run.close()


def test_a_trial_goes_through_one_loop(stage: TrialStage) -> None:
    with stage.begun() as run:
        list(run.rounds(1))
        with pytest.raises(RacimoError, match="one loop"):
            run.rounds(1)


def test_state_that_has_state_dicts_keeps_its_objects(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    first = Rounds(tmp_path, 3, {"model": model, "seen": [1]})
    first.done = 1
    first.save("beside")
    other = torch.nn.Linear(2, 1)
    state = {"model": other, "seen": []}
    second = Rounds(tmp_path, 3, state)
    assert second.restore() == "beside"
    assert state == {"model": other, "seen": [1]}
    assert torch.equal(other.weight, model.weight)
    assert list(second.numbers) == [2, 3]


def test_saving_takes_its_part_of_the_time_and_no_more() -> None:
    now_s = 0.0
    pace = Pace(lambda: now_s)
    saved = 0
    for _ in range(1_000):
        now_s += 1.0
        if pace.due:
            saved += 1
            with pace.saving():
                now_s += 1.0
    assert saved * 1.0 / now_s <= MOST_OF_TIME * 1.1
    assert saved > 40
