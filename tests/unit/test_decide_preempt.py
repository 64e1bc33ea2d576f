"""Elastic runs of lower priority give devices back to whoever matters more: as few as needed, and get them back."""

import pytest
from decide_stage import node
from test_decide_tune import TuneStage

from racimo.state import events as ev


def leaving(stage: TuneStage, run: str) -> dict[int, str]:
    return {worker.index: worker.leaving for worker in stage.run(run).live_workers if worker.leaving}


def let_go(stage: TuneStage, *runs: str) -> None:
    """Whoever was asked to leave does."""
    outcomes = {"release": "released", "pause": "paused", "abort": "killed"}
    for run in runs:
        for index, how in leaving(stage, run).items():
            stage.exit(run, index, outcomes[how])  # type: ignore[arg-type]


@pytest.fixture
def stage() -> TuneStage:
    return TuneStage(node(4))


def test_a_study_shrinks_for_a_run_that_is_more_important_and_grows_again(stage: TuneStage) -> None:
    study = stage.tune(trials=100, priority="low")
    stage.all_ready(study)
    run = stage.command(workers=2)
    assert leaving(stage, study) == {3: "release", 2: "release"}
    assert stage.core.why(run).text.endswith(f"{study} gives 2 back")
    let_go(stage, study)
    assert len(stage.run(run).live_workers) == 2 and len(stage.run(study).live_workers) == 2
    for index in (0, 1):
        stage.exit(run, index)
    assert len(stage.run(study).live_workers) == 4


def test_whoever_gives_says_for_whom_and_how_many(stage: TuneStage) -> None:
    study = stage.tune(trials=100, priority="low")
    stage.all_ready(study)
    run = stage.command(workers=3)
    reason = stage.only(ev.WorkersLeaving).reason
    assert reason.code == "yields"
    assert reason.text == f"{run} (normal before low) needs 3 devices, 0 free: from 4 to 1 workers until there are" \
        " devices for all"  # fmt: skip
    assert reason.counts == {"needed": 3, "free": 0, "from": 4, "to": 1, f"for/{run}": 3}


def test_equals_do_not_push_each_other_out(stage: TuneStage) -> None:
    study = stage.tune(trials=100)
    stage.all_ready(study)
    stage.command(workers=2)
    assert leaving(stage, study) == {}


def test_what_only_its_user_understands_is_left_alone(stage: TuneStage) -> None:
    low = stage.command(workers=4, priority="low")
    stage.command(workers=1, priority="high")
    assert leaving(stage, low) == {}


def test_an_elastic_training_shrinks_to_its_least_before_it_is_paused(stage: TuneStage) -> None:
    low = stage.elastic("2..4", priority="low")
    stage.command(workers=2, priority="high")
    assert leaving(stage, low) == {3: "release", 2: "release"}
    let_go(stage, low)
    stage.command(workers=1, priority="high")
    assert leaving(stage, low) == {0: "pause", 1: "pause"}
    let_go(stage, low)
    assert stage.run(low).status == "queued" and not stage.run(low).hold


def test_a_run_that_was_paused_for_another_goes_on_by_itself(stage: TuneStage) -> None:
    """kueue#2821: the victim was admitted first and the high priority never ran."""
    low = stage.elastic(4, priority="low")
    high = stage.command(workers=1, priority="high")
    let_go(stage, low)
    assert stage.run(high).status == "running" and stage.run(low).status == "queued"
    stage.exit(high, 0)
    assert stage.run(low).status == "running" and stage.run(low).attempt == 2


def test_nobody_is_disturbed_where_it_would_not_help(stage: TuneStage) -> None:
    low = stage.elastic("1..3", priority="low")
    stage.command(workers=1)
    stage.command(workers=4, priority="high")
    assert leaving(stage, low) == {}


def test_what_is_on_its_way_is_counted_and_nothing_more_is_taken(stage: TuneStage) -> None:
    study = stage.tune(trials=100, priority="low")
    stage.all_ready(study)
    stage.command(workers=2)
    for _ in range(3):
        stage.turn(10.0)
        assert leaving(stage, study) == {3: "release", 2: "release"}


def test_of_equals_the_newest_goes_first() -> None:
    """determined#3340: the oldest was preempted, the wrong one resumed."""
    stage = TuneStage(node(4))
    older, newer = (stage.elastic(2, priority="low") for _ in range(2))
    stage.command(workers=1)
    assert leaving(stage, older) == {} and leaving(stage, newer) == {0: "pause", 1: "pause"}


def test_the_lowest_class_goes_first() -> None:
    stage = TuneStage(node(4))
    low = stage.elastic(2, priority="low")
    normal = stage.elastic(2)
    stage.command(workers=1, priority="high")
    assert leaving(stage, normal) == {} and leaving(stage, low) == {0: "pause", 1: "pause"}


def test_all_shrink_before_anyone_is_paused() -> None:
    stage = TuneStage(node(4))
    low = stage.elastic(2, priority="low")
    normal = stage.elastic("1..2")
    stage.command(workers=1, priority="high")
    assert leaving(stage, low) == {} and leaving(stage, normal) == {1: "release"}


def test_a_worker_that_needs_two_devices_gets_them_on_one_node() -> None:
    stage = TuneStage(node(2, "n1", address="a"), node(2, "n2", address="b"))
    study = stage.tune(trials=100, priority="low")
    stage.all_ready(study)
    run = stage.command(workers=1, devices="cpu:2")
    gone = [stage.run(study).workers[index] for index in leaving(stage, study)]
    assert len(gone) == 2 and len({worker.node for worker in gone}) == 1
    let_go(stage, study)
    assert stage.run(run).status == "running"


def test_devices_of_another_kind_are_not_taken() -> None:
    stage = TuneStage(node(2, "n1", address="a"), node(2, "n2", "cuda", address="b"))
    cpu = stage.tune(trials=100, priority="low", devices="cpu:1")
    cuda = stage.tune(trials=100, priority="low", devices="cuda:1")
    for run in (cpu, cuda):
        stage.all_ready(run)
    stage.command(workers=1, devices="cuda:1")
    assert leaving(stage, cpu) == {} and list(leaving(stage, cuda).values()) == ["release"]


def test_trials_that_share_a_device_give_it_back_together() -> None:
    stage = TuneStage(node(2, kind="cuda"))
    study = stage.tune(trials=100, priority="low", devices="cuda:0.5")
    stage.all_ready(study)
    assert len(stage.run(study).live_workers) == 4
    run = stage.command(workers=1, devices="cuda:1")
    gone = [stage.run(study).workers[index] for index in leaving(stage, study)]
    assert len(gone) == 2 and len({worker.devices for worker in gone}) == 1
    let_go(stage, study)
    assert stage.run(run).status == "running"


def test_a_study_that_has_not_begun_yet_ends_its_new_workers_at_once(stage: TuneStage) -> None:
    study = stage.tune(trials=100, priority="low")
    stage.command(workers=4, priority="high")
    assert set(leaving(stage, study).values()) == {"abort"} and len(leaving(stage, study)) == 4
    let_go(stage, study)
    assert stage.run(study).status == "queued"


def test_a_restart_in_the_middle_takes_nothing_more(stage: TuneStage) -> None:
    study = stage.tune(trials=100, priority="low")
    stage.all_ready(study)
    run = stage.command(workers=2)
    stage.restart()
    stage.core.node_joined(node(4))
    stage.turn()
    assert leaving(stage, study) == {3: "release", 2: "release"}
    let_go(stage, study)
    assert stage.run(run).status == "running"


def test_a_paused_trial_of_a_study_that_yielded_goes_on_where_it_was_saved(stage: TuneStage) -> None:
    study = stage.tune(trials=100, parallel=1, priority="low", rounds=9)
    stage.all_ready(study)
    high = stage.command(workers=4, priority="high")
    assert leaving(stage, study) == {0: "pause"}
    stage.end_slice(study, 0, "halted", 0.5, rounds=1)
    let_go(stage, study)
    for index in range(4):
        stage.exit(high, index)
    stage.all_ready(study)
    ((_, grant),) = stage.grants(study).items()
    assert grant.trial == 0 and stage.study(study).trials[0].saved == 1
