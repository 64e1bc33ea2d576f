"""Trials that share a device: so many of one run, and nobody else while one of them lives."""

from pathlib import Path

import pytest
from decide_stage import node
from test_decide_tune import TuneStage

from racimo.agent.entry import Entry
from racimo.agent.protocol import WorkerOrder
from racimo.agent.turns import strays
from racimo.decide.fit import Ask, Pool
from racimo.spec.run import RunSpec
from racimo.spec.study import StudySpec

STUDY = StudySpec(space={"x": "0.0..1.0"}, metric="loss")


def spec(devices: str, **fields: object) -> RunSpec:
    return RunSpec(tune="t.py:f", study=STUDY, devices=devices, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("devices", "shares"), [("cuda:0.5", 2), ("cuda:.25", 4), ("cuda:0.33", 3), ("cuda:1", 1), ("cuda", 1), ("", 1)]
)
def test_a_fraction_says_how_many_trials_share_a_device(devices: str, shares: int) -> None:
    found = spec(devices)
    assert (found.shares, found.devices_per_worker) == (shares, 1)


@pytest.mark.parametrize("devices", ["cuda:0.4", "cuda:0.7", "cuda:0.001", "cuda:0.0", "cuda:1.5"])
def test_a_fraction_that_does_not_divide_a_device_is_refused(devices: str) -> None:
    with pytest.raises(ValueError, match=r"shared by 2 to 64 trials alike|KIND:COUNT"):
        spec(devices)


def test_only_trials_share_devices() -> None:
    with pytest.raises(ValueError, match="only trials share a device"):
        RunSpec(train="t.py", devices="cuda:0.5")


def test_a_trial_of_several_workers_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="a trial runs on one worker, not on 2"):
        spec("", workers=2)


def test_workers_that_share_fill_one_device_before_the_next() -> None:
    ask = Ask(kind="cuda", per_worker=1, shares=2)
    pool = Pool({("n1", "cuda"): [0, 1, 2]})
    assert pool.room(ask) == 6
    placements = pool.take(ask, pool.choose(ask, 3), 0)
    assert [place.devices for place in placements] == [(0,), (0,), (1,)]
    assert pool.room(ask) == 2
    assert pool.room(Ask(kind="cuda", per_worker=1)) == 1  # the half that is free is the run's own


def entry(run: str, attempt: int, index: int, *devices: int, shares: int = 2) -> Entry:
    order = WorkerOrder(worker=f"{run}/{attempt}/{index}", kind="tune", devices=devices, shares=shares)
    return Entry(order=order, directory=Path("/nowhere"))


def test_an_agent_starts_a_worker_beside_its_siblings_and_beside_nobody_else() -> None:
    siblings = {one.name: one for one in (entry("a", 1, 0, 3), entry("a", 1, 1, 3))}
    assert strays(siblings, siblings["a/1/1"]) == []
    others = {one.name: one for one in (entry("b", 1, 0, 3), entry("a", 1, 0, 4), entry("a", 2, 1, 3))}
    assert [one.name for one in strays(others, others["a/2/1"])] == ["b/1/0", "a/1/0"]


def devices_of(stage: TuneStage, run: str) -> list[tuple[int, ...]]:
    return sorted(worker.devices for worker in stage.run(run).live_workers)


def test_a_worker_that_died_is_replaced_on_the_device_that_its_siblings_hold() -> None:
    stage = TuneStage(node(2))
    run = stage.tune(trials=50, rounds=9, devices="cpu:0.5")
    assert devices_of(stage, run) == [(0,), (0,), (1,), (1,)]
    stage.all_ready(run)
    victim = next(worker for worker in stage.run(run).live_workers if worker.devices == (1,))
    stage.exit(run, victim.index, "killed")
    assert devices_of(stage, run) == [(0,), (0,), (1,), (1,)]
    assert len(stage.run(run).workers) == 5


def test_a_shared_device_is_free_once_all_have_left_it_and_is_paid_once() -> None:
    stage = TuneStage(node(1))
    run = stage.tune(trials=2, rounds=9, scheduler="none", devices="cpu:0.5")
    stage.all_ready(run)
    first, second = (worker.index for worker in stage.run(run).live_workers)
    for index in (first, second):
        stage.end_slice(run, index, "finished", rounds=9)
    before = stage.run(run).device_s
    stage.exit(run, second, "released")
    assert not stage.state.free["n1", "cpu"]
    stage.exit(run, first, "released")
    assert stage.state.free["n1", "cpu"] == [0]
    assert stage.run(run).device_s - before == pytest.approx(2.0)  # the exits say 2 s each, of half a device
