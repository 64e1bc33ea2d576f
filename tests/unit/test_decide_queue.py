"""Who gets devices: priority, then first come, gangs whole, and every wait with its numbers."""

import time
from collections.abc import Callable

import pytest
from decide_stage import Stage, node

from racimo.control import core as core_module
from racimo.spec.errors import RacimoError
from racimo.spec.run import RunSpec
from racimo.state import events as ev


def test_first_come_first_served() -> None:
    stage = Stage(node(1))
    first, second, third = stage.command(), stage.command(), stage.command()
    stage.exit(first, 0)
    assert stage.only(ev.AttemptPlanned).run == second
    assert stage.run(third).status == "queued"


def test_priority_goes_before_order_of_submission() -> None:
    stage = Stage(node(1))
    running = stage.command()
    low, normal, high = (stage.command(priority=p) for p in ("low", "normal", "high"))
    order = []
    for run in (running, high, normal):
        stage.exit(run, 0)
        order.append(stage.only(ev.AttemptPlanned).run)
    assert order == [high, normal, low]


def test_a_gang_waits_for_all_its_devices_and_says_who_holds_them() -> None:
    stage = Stage(node(4))
    holder = stage.command(workers=2)
    gang = stage.command(workers=3)
    reason = stage.core.why(gang)
    assert reason.text == f"needs 3 devices, 2 of 4 free; {holder} holds 2"
    assert reason.counts == {"needed": 3, "free": 2, "total": 4, f"blocked_by/{holder}": 2}


def test_small_runs_do_not_starve_a_gang() -> None:
    """volcano#748, KAI#1969: a large gang was starved by small jobs."""
    stage = Stage(node(4))
    holder = stage.command(workers=2)
    gang = stage.command(workers=4)
    small = stage.command(workers=1)
    assert stage.run(small).status == "queued"
    assert f"behind {gang}" in stage.core.why(small).text
    stage.exit(holder, 0)
    stage.exit(holder, 1)
    assert stage.only(ev.AttemptPlanned).run == gang


def test_two_different_waits_have_two_different_words() -> None:
    """dstack#3405: two different situations, one message."""
    stage = Stage(node(2))
    stage.command(workers=2)
    first, second = stage.command(workers=2), stage.command()
    assert stage.core.why(first).code == "waits-devices"
    assert stage.core.why(second).code == "waits-turn"


def test_a_run_of_another_kind_of_device_does_not_wait_behind() -> None:
    stage = Stage(node(1, "cpus"), node(1, "gpus", kind="cuda"))
    stage.command(devices="cuda:1")
    blocked = stage.command(devices="cuda:1")
    other = stage.command(devices="cpu:1")
    assert stage.run(blocked).status == "queued"
    assert stage.run(other).status == "running"


def test_an_elastic_run_starts_with_what_is_free_from_its_least_on() -> None:
    stage = Stage(node(4))
    stage.command(workers=1)
    run = stage.train("2..4")
    assert len(stage.run(run).live_workers) == 3
    assert stage.run(run).reason.text == "starts with 3 of 2..4 workers on 3 devices"


def test_devices_of_one_worker_are_on_one_node() -> None:
    stage = Stage(node(3, "a"), node(3, "b"))
    run = stage.command(workers=2, devices="cpu:4")
    places = [(worker.node, len(worker.devices)) for worker in stage.run(run).live_workers]
    assert sorted(places) == [("a", 2), ("b", 2)]


def placed(stage: Stage, run: str) -> dict[str, int]:
    nodes = [worker.node for worker in stage.run(run).live_workers]
    return {name: nodes.count(name) for name in sorted(set(nodes))}


def test_a_gang_goes_to_the_tightest_node_that_holds_it_whole() -> None:
    stage = Stage(node(8, "large"), node(3, "middle"), node(2, "small"))
    assert placed(stage, stage.command(workers=3)) == {"middle": 3}
    assert placed(stage, stage.command(workers=3)) == {"large": 3}


def test_a_gang_that_no_node_holds_takes_as_few_as_possible() -> None:
    stage = Stage(node(2, "a"), node(4, "b"), node(1, "c"), node(3, "d"))
    assert placed(stage, stage.command(workers=6)) == {"a": 2, "b": 4}
    assert placed(stage, stage.command(workers=4)) == {"c": 1, "d": 3}


def test_an_elastic_run_grows_on_the_nodes_that_it_has() -> None:
    stage = Stage(node(4, "a"), node(1, "b"))
    blocker = stage.command(workers=2, devices="cpu:2")
    run = stage.elastic("1..3")
    before = placed(stage, run)
    stage.exit(blocker, 0, turn=False)
    stage.exit(blocker, 1)
    assert set(placed(stage, run)) == set(before)


def test_devices_that_lie_scattered_are_another_wait_than_devices_that_are_taken() -> None:
    """dstack#3405: two different situations, one message."""
    stage = Stage(node(2, "a"), node(2, "b"))
    stage.command(), stage.command(devices="cpu:2")
    taken = stage.command(devices="cpu:2")
    assert stage.core.why(taken).code == "waits-devices"
    stage = Stage(node(2, "a"), node(2, "b"), node(2, "c"))
    runs = [stage.command(devices="cpu:2") for _ in range(3)]
    scattered = stage.command(devices="cpu:2")
    assert stage.core.why(scattered).code == "waits-devices"
    stage.core.stop(scattered)
    for run in runs:
        stage.exit(run, 0)
    singles = [stage.command() for _ in range(6)]
    for run in (singles[0], singles[2]):
        stage.exit(run, 0)
    scattered = stage.command(devices="cpu:2")
    reason = stage.core.why(scattered)
    assert (reason.code, reason.counts["free"]) == ("waits-one-node", 2)
    assert "at most 1 on one node where each worker needs 2" in reason.text


def test_a_gang_that_lost_workers_before_it_began_does_not_hold_the_rest_for_ever() -> None:
    """Two gangs that each kept a part and waited for the other's.

    kueue#2821: who had to give way was let in first, and the high priority never ran. kueue#3779: in and out, for ever.
    """
    stage = Stage(node(1, "a"), node(1, "b"), node(1, "c"))
    run = stage.train(2)
    other = stage.command()
    older = stage.command(workers=2, priority="high")
    stage.started(run)
    stage.ready(run, 0)
    gone = stage.run(run).workers[1].node
    stage.core.node_silent(gone)
    stage.core.forget_node(gone, confirm_dead=True)
    stage.turn()
    leaving = stage.only(ev.WorkersLeaving)
    assert (leaving.how, leaving.indices, leaving.reason.code) == ("abort", (0,), "begins-anew")
    stage.exit(run, 0, "killed")
    for _ in range(5):
        stage.turn(after_s=30)
        assert not stage.intents, "it queues, and nobody is moved about"
    stage.exit(other, 0)
    assert (stage.run(older).status, stage.run(run).status) == ("running", "queued")


def test_a_gang_that_lost_a_worker_before_it_began_gets_its_device_again_whoever_waits() -> None:
    stage = Stage(node(2))
    run = stage.train(2)
    stage.command(workers=2, priority="high")
    stage.started(run)
    stage.ready(run, 0)
    stage.exit(run, 1, "killed")
    stage.turn(after_s=1)
    assert stage.only(ev.WorkersPlanned).run == run


def test_a_run_whose_node_was_lost_keeps_its_place_before_later_ones() -> None:
    """dstack#4246: the longer a run waits the less often it competes."""
    stage = Stage(node(1, "n1"))
    first = stage.command(retries=1)
    stage.started(first)
    later = stage.command()
    stage.core.node_silent("n1")
    stage.turn()
    stage.core.forget_node("n1", confirm_dead=True)
    stage.turn()
    assert (stage.run(first).status, stage.run(later).status) == ("queued", "queued")
    stage.core.node_joined(node(1, "n2"))
    stage.turn()
    assert (stage.run(first).status, stage.run(later).status) == ("running", "queued")


def test_a_large_gang_over_several_nodes_is_not_starved_by_small_jobs() -> None:
    """volcano#748, KAI#1969: devices that come free on any of the nodes are kept for it."""
    stage = Stage(node(2, "a"), node(2, "b"))
    holders = [stage.command(workers=2), stage.command(workers=2)]
    gang = stage.command(workers=4)
    small = [stage.command() for _ in range(3)]
    for index in range(2):
        stage.exit(holders[0], index)
    assert all(stage.run(run).status == "queued" for run in small), "two devices are free, and they are the gang's"
    for index in range(2):
        stage.exit(holders[1], index)
    assert stage.run(gang).status == "running"


@pytest.mark.parametrize(
    "spec, words",
    [
        (RunSpec(command=("x",), workers=5), "asked for 5 devices, the whole cluster has 4"),
        (RunSpec(train="t.py", workers="6..8"), "asked for 6 devices, the whole cluster has 4"),
        (RunSpec(command=("x",), devices="cuda:1"), "asked for 1 cuda device, the whole cluster has 0"),
        (
            RunSpec(command=("x",), devices="cpu:3"),
            "asked for 3 cpu devices on one node, the whole cluster has 4, and no node has more than 2",
        ),
        (
            RunSpec(command=("x",), workers=2, devices="cpu:6"),
            "asked for 6 cpu devices (2 workers with 3 each on one"
            " node), the whole cluster has 4, and no node has more than 2",
        ),
        (RunSpec(command=("x",), memory="64GB"), "asked for 64.0 GB of memory per worker, the largest node has 8.0 GB"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(spec: RunSpec, words: str) -> None:
    """ray#34816: an impossible request hung in silence."""
    stage = Stage(node(2, "a", memory_bytes=8 * 10**9), node(2, "b", memory_bytes=8 * 10**9))
    with pytest.raises(RacimoError) as caught:
        stage.core.submit(spec, "r")
    assert caught.value.code == "can-never-fit"
    assert words in caught.value.message
    assert not stage.state.runs


def test_a_run_for_which_nodes_are_missing_now_is_in_nobodys_way() -> None:
    stage = Stage(node(1, "a"), node(3, "b"))
    stage.core.node_silent("b")
    stage.turn()
    large, small = stage.command(workers=3), stage.command()
    assert stage.core.why(large).code == "waits-nodes"
    assert stage.run(small).status == "running"
    stage.core.node_joined(node(3, "b"))
    stage.turn()
    assert stage.run(large).status == "running"


def test_a_full_queue_refuses_and_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "MAX_QUEUED_RUNS", 3)
    stage = Stage(node(1))
    for _ in range(4):
        stage.command()
    with pytest.raises(RacimoError) as caught:
        stage.command()
    assert caught.value.code == "queue-full"
    assert len(stage.state.runs) == 4


def test_the_same_request_is_the_same_run() -> None:
    stage = Stage()
    spec = RunSpec(command=("x",))
    assert stage.core.submit(spec, "once").id == stage.core.submit(spec, "once").id
    assert len(stage.state.runs) == 1


@pytest.mark.parametrize(
    "spec, name",
    [
        (RunSpec(command=("/usr/bin/My_Tool.sh",)), "my-tool-sh-1"),
        (RunSpec(train="dir/Train GPT.py:main"), "train-gpt-1"),
        (RunSpec(train="t.py", name="mine"), "mine-1"),
        (RunSpec(command=("???",)), "run-1"),
        (RunSpec(command=("x" * 90,)), "x" * 40 + "-1"),
    ],
)
def test_a_run_is_called_by_its_name_its_script_or_its_command(spec: RunSpec, name: str) -> None:
    assert Stage().core.submit(spec, "").id == name


def test_numbers_count_through_all_names() -> None:
    stage = Stage()
    assert [stage.command(), stage.train(), stage.command(name="a")] == ["work-1", "train-2", "a-3"]


def test_a_large_fleet_is_decided_in_milliseconds() -> None:
    """2,000 nodes and 1,000 runs: what a tick costs, and what one more submit costs until its start."""
    stage = Stage(*(node(4, f"n{number:04}") for number in range(200)))
    for number in range(200, 2_000):
        stage.core.node_joined(node(4, f"n{number:04}"))
    for number in range(500):
        stage.core.submit(RunSpec(command=("x",)), f"c{number}")
        stage.core.submit(RunSpec(train="t.py:f", workers="1..4"), f"t{number}")
    stage.core.tick()
    stage.core.commit()
    stage.core.take_effects()

    def least_s(action: Callable[[], object]) -> float:
        times_s = []
        for _ in range(5):
            began_s = time.perf_counter()
            action()
            times_s.append(time.perf_counter() - began_s)
        return min(times_s)

    def one_more() -> None:
        stage.core.submit(RunSpec(command=("x",)), f"more{stage.state.num_submitted}")
        stage.core.tick()
        stage.core.commit()
        assert len(stage.core.take_effects()) == 1

    assert least_s(stage.core.tick) < 0.03
    assert least_s(one_more) < 0.06


def test_a_thousand_waiting_runs_are_decided_in_tenths_of_a_second() -> None:
    stage = Stage(node(1))
    for number in range(1_000):
        stage.core.submit(RunSpec(command=("x",)), f"r{number}")
    stage.core.tick()
    began = time.perf_counter()
    stage.core.tick()
    assert time.perf_counter() - began < 0.3
