"""The core between crashes: fencing, what is done again after an agent came back, and nothing before it is durable."""

from typing import Any

import pytest
from decide_stage import HandClock, Stage, node

from racimo.act.journal import MemoryJournal
from racimo.agent.protocol import WorkerState
from racimo.control.core import FIRST_EXEC_INDEX, Core
from racimo.control.effects import Announce, Forget, Start
from racimo.spec.errors import RacimoError
from racimo.spec.quantity import WorkerRange
from racimo.spec.run import RunSpec
from racimo.state import events as ev
from racimo.state.nouns import Exit, Reason


def shown(stage: Stage) -> list[tuple[Any, ...]]:
    """Effects as (kind, worker, how)."""
    return [
        (type(effect).__name__, getattr(effect, "worker", ""), getattr(effect, "how", "")) for effect in stage.effects
    ]


def resync(stage: Stage, *workers: WorkerState) -> None:
    stage.core.resync("n1", workers)
    stage.turn()


def alive(worker: str, pid: int | None = 1000) -> WorkerState:
    return WorkerState(worker=worker, pid=pid, exited=False)


def test_nothing_comes_out_before_it_is_durable() -> None:
    stage = Stage()
    stage.core.submit(RunSpec(command=("x",)), "r")
    stage.core.tick()
    assert stage.core.take_effects() == []
    assert stage.core.take_records() == []
    stage.core.commit()
    assert [type(effect) for effect in stage.core.take_effects()] == [Start]
    assert [type(record.event) for record in stage.core.take_records()] == [ev.RunSubmitted, ev.AttemptPlanned]
    assert stage.core.take_effects() == []


def test_a_restart_folds_to_the_same_state_and_forgets_what_was_not_committed() -> None:
    stage = Stage()
    run = stage.elastic(2)
    before = stage.state.to_bytes()
    stage.core.stop(run)
    again = Core(MemoryJournal(stage.disk), HandClock())
    assert again.state.to_bytes() == before


def test_time_does_not_go_back_after_a_restart_with_an_earlier_clock() -> None:
    stage = Stage()
    stage.command()
    again = Core(MemoryJournal(stage.disk), HandClock(at_s=1.0))
    last = again.state.at_s
    again.submit(RunSpec(command=("x",)), "later")
    again.tick()
    assert again.state.at_s > last


def test_a_snapshot_and_the_records_after_it_are_the_whole_journal() -> None:
    stage = Stage()
    stage.elastic(2)
    stage.core.save_snapshot()
    stage.command()
    again = Core(MemoryJournal(stage.disk), HandClock())
    assert again.state == stage.state
    assert again.notes == []


def test_a_snapshot_of_another_version_is_left_aside_and_said() -> None:
    stage = Stage()
    stage.command()
    stage.disk.snapshot = (2, b"\x80")
    again = Core(MemoryJournal(stage.disk), HandClock())
    assert again.state == stage.state
    assert "snapshot" in again.notes[0]


def test_what_is_known_already_is_dropped() -> None:
    stage = Stage()
    run = stage.train(1)
    events = [
        ev.WorkerStarted(run=run, attempt=1, index=0, pid=7),
        ev.WorkerReady(run=run, attempt=1, index=0, address="a", micro_shards=2, numerics="n"),
        ev.WorkerExited(run=run, attempt=1, index=0, exit=Exit(outcome="finished", code=0)),
    ]
    for event in events:
        assert stage.core.agent_event(event)
        seq = stage.state.seq
        assert not stage.core.agent_event(event)
        assert stage.state.seq == seq


def test_a_worker_of_an_older_attempt_changes_nothing_and_is_ended() -> None:
    stage = Stage()
    run = stage.command(retries=1)
    stage.exit(run, 0, "failed")
    before = stage.state.to_bytes()
    assert not stage.core.agent_event(ev.WorkerStarted(run=run, attempt=1, index=0, pid=7))
    assert not stage.core.agent_event(ev.WorkerExited(run=run, attempt=1, index=0, exit=Exit(outcome="finished")))
    assert stage.state.to_bytes() == before
    stage.turn()
    assert shown(stage) == [("Stop", f"{run}/1/0", "abort")]


def test_workers_of_exec_commands_are_none_of_the_cores_business() -> None:
    stage = Stage()
    run = stage.command()
    stage.started(run)
    name = f"{run}/1/{FIRST_EXEC_INDEX + 3}"
    assert not stage.core.agent_event(ev.WorkerStarted(run=run, attempt=1, index=FIRST_EXEC_INDEX + 3, pid=7))
    resync(stage, alive(f"{run}/1/0"), alive(name))
    assert ("Stop", name, "abort") not in shown(stage)


def test_strangers_are_aborted() -> None:
    """ray#41437: a job failed on its start time-out started later all the same and held a GPU."""
    stage = Stage()
    run = stage.command()
    resync(stage, alive(f"{run}/1/0"), alive("ghost-9/1/0"), alive(f"{run}/7/0"), alive("not a name"))
    aborted = [worker for _, worker, how in shown(stage) if how == "abort"]
    assert aborted == ["ghost-9/1/0", f"{run}/7/0", "not a name"]


def test_what_was_planned_and_never_arrived_is_started_again() -> None:
    stage = Stage()
    run = stage.command(workers=2)
    resync(stage, alive(f"{run}/1/1"))
    assert ("Start", f"{run}/1/0", "") in shown(stage)
    assert ("Start", f"{run}/1/1", "") not in shown(stage)


def test_what_was_started_and_is_unknown_now_is_lost_not_repeated() -> None:
    stage = Stage()
    run = stage.command()
    stage.started(run)
    resync(stage)
    assert stage.run(run).status == "lost"
    assert not [effect for effect in stage.effects if isinstance(effect, Start)]


def test_what_has_exited_unseen_waits_for_its_event() -> None:
    stage = Stage()
    run = stage.command()
    stage.started(run)
    resync(stage, WorkerState(worker=f"{run}/1/0", pid=7, exited=True))
    assert stage.run(run).status == "running"
    assert not [effect for effect in stage.effects if isinstance(effect, Start)]


def test_a_stop_is_said_again() -> None:
    stage = Stage()
    run = stage.command()
    stage.started(run)
    stage.core.stop(run)
    stage.turn()
    resync(stage, alive(f"{run}/1/0"))
    assert ("Stop", f"{run}/1/0", "stop") in shown(stage)


def test_what_is_stopped_before_it_ever_arrived_never_starts() -> None:
    stage = Stage()
    run = stage.command()
    stage.core.stop(run)
    stage.turn()
    resync(stage)
    assert stage.run(run).status == "stopped"
    assert not [effect for effect in stage.effects if isinstance(effect, Start)]


def test_a_start_that_became_pointless_before_it_was_durable_is_not_carried_out() -> None:
    stage = Stage()
    run = stage.core.submit(RunSpec(command=("x",)), "r").id
    stage.core.tick()
    stage.core.agent_event(ev.WorkerExited(run=run, attempt=1, index=0, exit=Exit(outcome="failed", code=1)))
    stage.turn()
    assert not [effect for effect in stage.effects if isinstance(effect, Start)]


def test_the_present_generation_is_announced_again() -> None:
    stage = Stage()
    run = stage.elastic(2)
    resync(stage, alive(f"{run}/1/0"), alive(f"{run}/1/1"))
    announced = [effect for effect in stage.effects if isinstance(effect, Announce)]
    assert [(effect.node, effect.number, len(effect.members)) for effect in announced] == [("n1", 1, 2)]


def test_a_frozen_run_is_frozen_again_and_a_resumed_one_thawed() -> None:
    stage = Stage()
    run = stage.command()
    stage.started(run)
    stage.core.pause(run)
    stage.turn()
    resync(stage, alive(f"{run}/1/0"))
    assert shown(stage) == [("Stop", f"{run}/1/0", "pause")]
    stage.core.resume(run)
    stage.turn()
    resync(stage, alive(f"{run}/1/0"))
    assert shown(stage) == [("Stop", f"{run}/1/0", "thaw")]


def test_a_node_that_is_known_as_it_is_makes_no_record() -> None:
    stage = Stage()
    seq = stage.state.seq
    stage.core.node_joined(node())
    assert stage.state.seq == seq
    stage.core.node_silent("n1")
    stage.core.node_silent("n1")
    stage.core.node_joined(node())
    assert stage.state.seq == seq + 2


@pytest.mark.parametrize(
    "kind, workers, code",
    [
        ("elastic", WorkerRange(1, 9), "too-many-workers"),
        ("elastic", WorkerRange(5, 8), "can-never-fit"),
        ("script", WorkerRange(1, 2), "wrong-state"),
        ("command", WorkerRange(1, 2), "invalid-request"),
    ],
)
def test_sizes_that_cannot_be_are_refused(kind: str, workers: WorkerRange, code: str) -> None:
    stage = Stage(node(4))
    run = stage.elastic("1..2") if kind == "elastic" else stage.train(1) if kind == "script" else stage.command()
    with pytest.raises(RacimoError) as caught:
        stage.core.scale(run, workers)
    assert caught.value.code == code
    assert stage.run(run).most == stage.run(run).spec.worker_range.most


@pytest.mark.parametrize("workers", [WorkerRange(9, 9), WorkerRange(5, 8), WorkerRange(1, 9)])
def test_a_refused_size_comes_with_one_that_is_taken(workers: WorkerRange) -> None:
    stage = Stage(node(4))
    run = stage.elastic("1..2")
    with pytest.raises(RacimoError) as caught:
        stage.core.scale(run, workers)
    assert caught.value.hint == f"racimo scale {run} 1..4" and caught.value.kind.exit_code in (2, 4)
    stage.core.scale(run, WorkerRange(1, 4))


def test_a_waiting_run_just_changes_its_size() -> None:
    stage = Stage(node(2))
    stage.command(workers=2)
    run = stage.train("1..2")
    stage.core.scale(run, WorkerRange(2, 2))
    assert (stage.run(run).least, stage.run(run).most) == (2, 2)


def test_an_unknown_run_is_said() -> None:
    for ask in (Stage().core.stop, Stage().core.pause, Stage().core.resume, Stage().core.why):
        with pytest.raises(RacimoError, match="there is no run 'nope-1'"):
            ask("nope-1")


def test_an_order_has_all_that_torchrun_promises() -> None:
    stage = Stage()
    run = stage.train(2, args=("--lr", "1"), retries=3, seed=5, variables={"A": "b"}, memory="1GB", threads=2)
    stage.exit(run, 0, "failed")
    stage.exit(run, 1, "killed")
    order = stage.core.order_for(f"{run}/2/1", secrets={"KEY": "s"})
    assert (order.rank, order.world_size, order.restart_count, order.max_restarts) == (1, 2, 1, 3)
    assert (order.rendezvous_key, order.seed, order.threads, order.memory_bytes) == (f"{run}/2", 5, 2, 10**9)
    assert (order.args, order.variables, order.secrets) == (("--lr", "1"), {"A": "b"}, {"KEY": "s"})
    assert len(order.devices) == 1


def test_a_newcomers_order_does_not_change_the_ranks_of_the_others() -> None:
    stage = Stage()
    run = stage.elastic(2)
    stage.exit(run, 1, "killed", commits=1)
    assert (stage.core.order_for(f"{run}/1/2").rank, stage.core.order_for(f"{run}/1/2").world_size) == (2, 3)
    assert stage.core.order_for(f"{run}/1/0").world_size == 2


def test_a_worker_frozen_before_its_run_became_elastic_is_thawed_when_its_node_is_back() -> None:
    """The word to go on was lost with the connection; meanwhile another worker made the run elastic."""
    stage = Stage(node(1, "n1"), node(1, "n2"))
    run = stage.train(2)
    stage.started(run)
    stage.core.pause(run)
    stage.turn()
    stage.core.resume(run)
    stage.turn()
    stage.ready(run, 0)
    away = stage.run(run).workers[1].node
    stage.core.resync(away, [alive(f"{run}/1/1")])
    stage.turn()
    assert ("Stop", f"{run}/1/1", "thaw") in shown(stage)


def test_a_node_hears_only_of_forgotten_runs_that_it_had() -> None:
    """Two thousand nodes that come back at once are not told of two hundred runs each."""
    stage = Stage(node(1, "n1"), node(1, "n2"))
    run = stage.command()
    stage.exit(run, 0)
    stage.core._record(ev.RunForgotten(run=run, reason=Reason(code="forgotten", text="old")))
    stage.turn()
    told = [effect.node for effect in stage.effects if isinstance(effect, Forget)]
    assert len(told) == 1
    for name in ("n1", "n2"):
        stage.core.resync(name, [])
        stage.turn()
        again = [effect.node for effect in stage.effects if isinstance(effect, Forget)]
        assert again == ([name] if name == told[0] else [])


def test_a_stray_is_ended_on_the_nodes_that_its_run_ever_had() -> None:
    stage = Stage(*(node(1, f"n{number}") for number in range(9)))
    run = stage.command(retries=1)
    first = stage.run(run).workers[0].node
    stage.exit(run, 0, "failed")
    assert not stage.core.agent_event(ev.WorkerStarted(run=run, attempt=1, index=0, pid=7))
    stage.turn()
    assert first in {effect.node for effect in stage.effects} and len(stage.effects) <= 2
