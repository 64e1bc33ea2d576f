"""Emptying a node: what moves, what may end by itself, and what the deadline does."""

import pytest
from decide_stage import Stage, node

from racimo.decide.drain import LEAVE_MOST_S, SETTLED_S
from racimo.spec.errors import RacimoError
from racimo.spec.quantity import WorkerRange
from racimo.state import events as ev


def hosts(*sizes: int) -> Stage:
    return Stage(*(node(size, f"n{number}", address=f"10.0.0.{number}") for number, size in enumerate(sizes, 1)))


def node_of(stage: Stage, run: str, index: int) -> str:
    return str(stage.run(run).workers[index].node)


def drain(stage: Stage, name: str, deadline_s: float | None = None) -> None:
    stage.core.drain(name, deadline_s)
    stage.turn()


def members(stage: Stage, run: str) -> tuple[int, ...]:
    generation = stage.run(run).generation
    return () if generation is None else generation.members


def left(stage: Stage) -> list[tuple[str, tuple[int, ...]]]:
    return [(intent.how, intent.indices) for intent in stage.intents if isinstance(intent, ev.WorkersLeaving)]


def test_a_drained_node_gets_nothing_new_and_says_that_it_is_empty() -> None:
    stage = hosts(1, 2)
    drain(stage, "n2")
    assert stage.state.nodes["n2"].reason.code == "drained"
    run, waiting = stage.command(), stage.command(workers=2)
    assert node_of(stage, run, 0) == "n1"
    assert stage.core.why(waiting).code == "waits-drained"
    assert "n2 drained" in stage.core.why(waiting).text
    stage.core.drain("n2", undo=True)
    stage.turn()
    assert stage.run(waiting).status == "running"
    assert stage.state.nodes["n2"].reason is None


def test_draining_survives_the_nodes_coming_back_and_the_heads_restart() -> None:
    stage = hosts(1, 1)
    drain(stage, "n2")
    stage.core.node_silent("n2")
    stage.turn()
    stage.restart()
    stage.core.node_joined(node(1, "n2", address="10.0.0.2"))
    stage.turn()
    assert (stage.state.nodes["n2"].draining, stage.state.nodes["n2"].status) == (True, "up")
    assert stage.state.nodes["n2"].reason.code == "drained"


def test_an_elastic_worker_is_replaced_elsewhere_first_and_then_let_go() -> None:
    """horovod#3399: a node that left gracefully made trained samples repeat."""
    stage = hosts(1, 1, 1)
    run = stage.elastic(2)
    stage.turn(after_s=SETTLED_S + 1)
    going = node_of(stage, run, 1)
    drain(stage, going)
    assert stage.only(ev.WorkersPlanned).reason.code == "moves"
    assert not left(stage), "not before its replacement is there"
    assert stage.state.nodes[going].reason.code == "draining"
    stage.started(run, 2)
    stage.ready(run, 2)
    assert left(stage) == [("release", (1,))]
    assert stage.only(ev.GenerationAnnounced).members == (0, 2), "in one change of generation"
    stage.exit(run, 1, "released")
    assert stage.state.nodes[going].reason.code == "drained"
    assert len(stage.run(run).live_workers) == 2


def test_without_free_devices_a_run_above_its_least_goes_on_smaller() -> None:
    stage = hosts(1, 1, 1)
    run = stage.elastic("1..3")
    going = node_of(stage, run, 2)
    drain(stage, going)
    assert left(stage) == [("release", (2,))]
    assert members(stage, run) == (0, 1)
    stage.exit(run, 2, "released")
    drain(stage, node_of(stage, run, 1))
    stage.exit(run, 1, "released")
    drain(stage, node_of(stage, run, 0))
    stage.turn(after_s=100)
    assert not left(stage)
    assert members(stage, run) == (0,), "not below its least"
    stage.core.drain(going, undo=True)
    stage.turn()
    assert stage.only(ev.WorkersPlanned).placements[0].node == going


def test_without_free_devices_a_run_at_its_least_stays_until_there_are_some() -> None:
    stage = hosts(1, 1, 1)
    other = stage.command()
    run = stage.elastic(2)
    stage.turn(after_s=SETTLED_S + 1)
    drain(stage, node_of(stage, run, 1))
    stage.turn(after_s=300)
    assert not left(stage)
    assert members(stage, run) == (0, 1)
    stage.exit(other, 0)
    assert stage.only(ev.WorkersPlanned).reason.code == "moves"


def test_who_says_that_it_holds_the_state_is_believed_at_once_and_nobody_is_taken_to_by_its_age() -> None:
    """A step may take minutes: ready for long is no sign of having got the state."""
    stage = hosts(2, 2)
    run = stage.elastic(2)
    stage.ready(run, holds=True)
    assert not stage.effects, "the others need not hear of it"
    drain(stage, node_of(stage, run, 0))
    stage.started(run, 2, 3)
    stage.ready(run, 2, 3)
    assert members(stage, run) == (0, 2, 3)
    stage.turn(after_s=10 * SETTLED_S)
    assert members(stage, run) == (0, 2, 3), "neither newcomer has the state yet"
    stage.ready(run, 3, holds=True)
    assert members(stage, run) == (2, 3)


def test_a_whole_run_moves_to_another_node_without_losing_its_state() -> None:
    """The newcomers join those who hold the state, and nobody leaves before one of them holds it too."""
    stage = hosts(2, 2)
    run = stage.elastic(2)
    going = node_of(stage, run, 0)
    drain(stage, going)
    assert {place.node for place in stage.only(ev.WorkersPlanned).placements} != {going}
    stage.started(run, 2, 3)
    stage.ready(run, 2, 3)
    assert members(stage, run) == (0, 2, 3)
    assert stage.core.next_due_s is not None
    for _ in range(3):
        stage.turn(after_s=SETTLED_S + 1)
    assert members(stage, run) == (2, 3)
    for index in (0, 1):
        stage.exit(run, index, "released")
    assert stage.run(run).status == "running"
    assert stage.state.nodes[going].reason.code == "drained"
    assert stage.run(run).attempt == 1


def test_the_number_of_workers_is_kept_with_several_to_move() -> None:
    stage = hosts(2, 1, 1, 1)
    run = stage.elastic("3..3")
    stage.turn(after_s=SETTLED_S + 1)
    going = max(("n1", "n2", "n3", "n4"), key=lambda name: sum(w.node == name for w in stage.run(run).live_workers))
    moving = [worker.index for worker in stage.run(run).live_workers if worker.node == going]
    assert len(moving) == 2
    drain(stage, going)
    assert len(stage.only(ev.WorkersPlanned).placements) == 2
    least = 3
    for index in (3, 4):
        stage.started(run, index)
        stage.ready(run, index)
        least = min(least, len(members(stage, run)))
    assert least == 3
    assert set(members(stage, run)) == {0, 1, 2, 3, 4} - set(moving)


def test_the_deadline_lets_an_elastic_run_go_on_with_fewer() -> None:
    stage = hosts(1, 1)
    run = stage.elastic(2)
    stage.turn(after_s=SETTLED_S + 1)
    drain(stage, node_of(stage, run, 1), deadline_s=60)
    assert not left(stage)
    assert stage.core.next_due_s == pytest.approx(stage.clock.at_s + 60, abs=0.1)
    stage.turn(after_s=60.1)
    assert left(stage) == [("release", (1,))]
    assert members(stage, run) == (0,)
    stage.turn(after_s=LEAVE_MOST_S)
    assert left(stage) == [("abort", (1,))], "who does not leave is ended"


def test_the_deadline_makes_a_run_that_is_wholly_there_save_and_queue() -> None:
    stage = hosts(2, 1)
    stage.command()
    run = stage.elastic(2)
    going = node_of(stage, run, 0)
    drain(stage, going, deadline_s=60)
    stage.turn(after_s=61)
    assert left(stage) == [("pause", (0, 1))]
    stage.exit(run, 0, "paused")
    assert not left(stage), "the other may still be saving"
    assert len(stage.run(run).workers) == 2, "nothing new beside those who save"
    stage.exit(run, 1, "paused")
    assert stage.run(run).status == "queued"
    assert stage.core.why(run).code == "waits-drained"
    stage.core.drain(going, undo=True)
    stage.turn()
    assert (stage.run(run).attempt, stage.run(run).retries_used) == (2, 0)


@pytest.mark.parametrize("retries", [0, 1])
def test_a_command_may_end_by_itself_until_the_deadline_then_it_is_stopped_with_its_grace(retries: int) -> None:
    stage = hosts(1, 1)
    run = stage.command(retries=retries, stop_grace="7s")
    stage.started(run)
    going = node_of(stage, run, 0)
    drain(stage, going, deadline_s=60)
    stage.turn(after_s=59)
    assert not left(stage)
    stage.turn(after_s=1.5)
    assert left(stage) == [("stop", (0,))]
    assert [(effect.how, effect.grace_s) for effect in stage.effects if effect.how == "stop"] == [("stop", 7.0)]
    stage.turn(after_s=5)
    assert not left(stage), "within its grace it is not killed"
    stage.exit(run, 0, "killed")
    if retries:
        assert (stage.run(run).attempt, node_of(stage, run, 0) != going) == (2, True)
    else:
        assert (stage.run(run).status, stage.run(run).failure.code) == ("failed", "node-drained")
        assert going in stage.run(run).failure.message


def test_a_command_that_ends_before_the_deadline_has_succeeded() -> None:
    stage = hosts(1, 1)
    run = stage.command()
    drain(stage, node_of(stage, run, 0), deadline_s=60)
    stage.exit(run, 0)
    assert stage.run(run).status == "succeeded"
    assert stage.core.next_due_s is None


def test_a_frozen_command_on_a_drained_node_is_ended_too() -> None:
    stage = hosts(1, 1)
    run = stage.command()
    stage.started(run)
    stage.core.pause(run)
    drain(stage, node_of(stage, run, 0), deadline_s=10)
    stage.turn(after_s=11)
    assert left(stage) == [("stop", (0,))]
    stage.exit(run, 0, "killed")
    assert stage.run(run).failure.code == "node-drained"


def test_scaling_down_while_draining_takes_those_who_have_to_leave() -> None:
    stage = hosts(1, 1, 1)
    other = stage.command()
    run = stage.elastic(2)
    going = node_of(stage, run, 0)
    drain(stage, going)
    assert not left(stage)
    stage.core.scale(run, WorkerRange(1, 1))
    stage.turn()
    assert left(stage) == [("release", (0,))]
    assert stage.run(other).status == "running"


def test_nothing_to_undo_and_no_such_node_are_said() -> None:
    stage = hosts(1)
    for name, undo, code in (("n1", True, "wrong-state"), ("n7", False, "node-unknown")):
        with pytest.raises(RacimoError) as caught:
            stage.core.drain(name, undo=undo)
        assert caught.value.code == code


def test_what_comes_to_its_end_within_its_grace_has_succeeded_and_is_not_repeated() -> None:
    stage = hosts(1, 1)
    run = stage.command(retries=1)
    stage.started(run)
    drain(stage, node_of(stage, run, 0), deadline_s=5)
    stage.turn(after_s=6)
    assert left(stage) == [("stop", (0,))]
    stage.exit(run, 0, "finished")
    assert (stage.run(run).status, stage.run(run).attempt) == ("succeeded", 1)
