"""Nodes that do not answer: who is given up, when, and what everybody is told meanwhile."""

import pytest
from decide_stage import Stage, node

from racimo.agent.protocol import WorkerState
from racimo.control.effects import Announce, Start, Stop
from racimo.decide.away import BYSTANDER_PATIENCE_S, HOLDERS_PATIENCE_S, LEASE_MARGIN_S
from racimo.spec.errors import RacimoError
from racimo.spec.quantity import WorkerRange
from racimo.state import events as ev
from racimo.state.lease import LEASE_S

WHOLE_LEASE_S = LEASE_S + LEASE_MARGIN_S


def hosts(*sizes: int) -> Stage:
    return Stage(*(node(size, f"n{number}", address=f"10.0.0.{number}") for number, size in enumerate(sizes, 1)))


def node_of(stage: Stage, run: str, index: int) -> str:
    return str(stage.run(run).workers[index].node)


def spread(stage: Stage, workers: int | str = 2, **spec: object) -> str:
    """A training run inside `run.steps` with a worker on each of the first nodes."""
    return stage.elastic(workers, **spec)


def silent(stage: Stage, *nodes: str, after_s: float = 0.0) -> None:
    for name in nodes:
        stage.core.node_silent(name)
    stage.turn(after_s)


def members(stage: Stage, run: str) -> tuple[int, ...]:
    generation = stage.run(run).generation
    return () if generation is None else generation.members


def test_a_silent_node_gets_nothing_new_and_keeps_what_it_has() -> None:
    stage = hosts(1, 1)
    run = spread(stage)
    silent(stage, node_of(stage, run, 1))
    assert not stage.intents
    assert len(stage.run(run).live_workers) == 2
    other = stage.command()
    assert stage.core.why(other).code == "waits-nodes" or stage.run(other).status == "queued"


def test_silence_and_a_stuck_peer_give_the_node_up_and_the_run_goes_on_elsewhere() -> None:
    """torchft#63: a killed member was never forgotten, so no new group formed."""
    stage = hosts(1, 1, 1)
    run = spread(stage)
    away, witness = node_of(stage, run, 1), f"{run}/1/0"
    stage.core.node_silent(away)
    stage.core.node_stuck(away, witness)
    stage.turn()
    assert stage.only(ev.NodeLost).node == away
    assert witness in stage.only(ev.NodeLost).reason.text
    assert stage.only(ev.WorkersLost).indices == (1,)
    assert stage.only(ev.GenerationAnnounced).members == (0,)
    placed = stage.only(ev.WorkersPlanned).placements[0].node
    assert placed not in (away, node_of(stage, run, 0)), "replaced elsewhere at once"
    assert {effect.node for effect in stage.effects if isinstance(effect, Announce)} >= {node_of(stage, run, 0)}
    assert stage.state.nodes[away].status == "lost"
    assert stage.run(run).deaths_without_progress == 0, "no crash of its own"


def test_silence_without_a_stuck_peer_evicts_nobody() -> None:
    """A step of five seconds, or a node whose agent starts again: nobody is stuck on it, so it is not lost."""
    stage = hosts(1, 1)
    run = spread(stage)
    silent(stage, node_of(stage, run, 1))
    stage.turn(after_s=60)
    assert len(stage.run(run).live_workers) == 2
    reason = stage.core.why(run)
    assert (reason.code, reason.counts["silent_s"]) == ("node-silent", 60.0)


def test_a_stuck_peer_of_a_node_that_answers_evicts_nobody() -> None:
    stage = hosts(1, 1)
    run = spread(stage)
    seq = stage.state.seq
    stage.core.node_stuck(node_of(stage, run, 1), f"{run}/1/0")
    assert stage.state.seq == seq


def test_everybody_silent_at_once_loses_nobody() -> None:
    """The head was restarted: what agents said before it is no evidence, and none comes while all are silent."""
    stage = hosts(1, 1, 1)
    run = spread(stage, 3)
    silent(stage, "n1", "n2", "n3")
    stage.core.node_stuck(node_of(stage, run, 1), f"{run}/1/0")
    stage.turn(after_s=30)
    assert not stage.intents
    for number in (1, 2, 3):
        stage.core.node_joined(node(1, f"n{number}", address=f"10.0.0.{number}"))
    stage.turn()
    assert members(stage, run) == (0, 1, 2)
    assert not stage.intents


@pytest.mark.parametrize("witness", ["own", "ended", "stranger"])
def test_only_a_live_worker_of_the_run_on_another_node_is_a_witness(witness: str) -> None:
    stage = hosts(1, 1, 1)
    run = spread(stage)
    other = stage.command()
    stage.started(other)
    away = node_of(stage, run, 1)
    stage.core.node_silent(away)
    names = {"own": f"{run}/1/1", "ended": f"{run}/1/7", "stranger": f"{other}/1/0"}
    stage.core.node_stuck(away, names[witness])
    stage.turn()
    assert stage.state.nodes[away].status == "silent"


def test_a_lost_nodes_devices_count_again_only_when_it_is_back_and_its_strays_are_ended() -> None:
    stage = hosts(1, 1)
    run = spread(stage, "1..2")
    away = node_of(stage, run, 1)
    stage.core.node_silent(away)
    stage.core.node_stuck(away, f"{run}/1/0")
    stage.turn()
    assert not [intent for intent in stage.intents if isinstance(intent, ev.WorkersPlanned)]
    stage.core.node_joined(node(1, away, address="10.0.0.9"))
    stage.core.resync(away, [WorkerState(worker=f"{run}/1/1", pid=7, exited=False)])
    stage.turn()
    assert stage.state.nodes[away].status == "up"
    assert stage.only(ev.WorkersPlanned).placements[0].node == away
    kinds = [(type(effect), effect.worker) for effect in stage.effects if isinstance(effect, Stop | Start)]
    assert kinds == [(Stop, f"{run}/1/1"), (Start, f"{run}/1/2")], "the stray first, then the newcomer"


def test_a_node_that_comes_back_in_time_just_goes_on() -> None:
    stage = hosts(1, 1)
    run = spread(stage)
    away = node_of(stage, run, 1)
    silent(stage, away)
    stage.core.node_joined(stage.state.nodes[away])
    stage.core.resync(away, [WorkerState(worker=f"{run}/1/1", pid=1001, exited=False)])
    stage.turn(after_s=1)
    assert members(stage, run) == (0, 1)
    assert stage.state.nodes[away].status == "up"


def test_a_run_wholly_on_silent_nodes_keeps_them_until_their_lease_has_ended() -> None:
    """Nobody could know that its workers do not go on committing."""
    stage = hosts(2, 2)
    run = spread(stage)
    away = node_of(stage, run, 0)
    assert node_of(stage, run, 1) == away, "a gang on one node"
    assert stage.run(run).elastic
    silent(stage, away)
    stage.turn(after_s=WHOLE_LEASE_S - 1)
    assert stage.run(run).attempt == 1
    assert stage.core.next_due_s is not None and stage.core.next_due_s <= stage.clock.at_s + 1.1
    stage.turn(after_s=1.1)
    assert stage.only(ev.WorkersLost).indices == (0, 1)
    assert stage.run(run).attempt == 2
    assert {worker.node for worker in stage.run(run).live_workers} != {away}


def test_who_is_silent_too_is_given_up_with_a_lost_node_and_one_generation_is_enough() -> None:
    """The head's cable is out: its own worker goes on alone, after one change of members instead of one per node."""
    stage = hosts(1, 1, 1)
    run = spread(stage, 3)
    silent(stage, node_of(stage, run, 1), node_of(stage, run, 2))
    assert not stage.intents
    stage.core.node_stuck(node_of(stage, run, 1), f"{run}/1/0")
    stage.turn()
    assert stage.only(ev.NodeLost).node == node_of(stage, run, 1), "the other one may only be slow to answer"
    assert stage.only(ev.WorkersLost).indices == (1, 2)
    assert "n2, n3 have not answered" in stage.only(ev.WorkersLost).reason.text
    assert stage.only(ev.GenerationAnnounced).members == (0,)


def test_who_is_silent_is_kept_where_nobody_who_answers_holds_the_newest_step() -> None:
    stage = hosts(1, 1, 1)
    run = spread(stage, 2)
    stage.core.scale(run, WorkerRange(2, 3))
    stage.turn()
    silent(stage, node_of(stage, run, 0), node_of(stage, run, 1))
    stage.core.node_stuck(node_of(stage, run, 0), f"{run}/1/2")
    stage.turn()
    assert stage.only(ev.NodeLost).node == node_of(stage, run, 0)
    assert len(stage.run(run).live_workers) == 3


def test_newcomers_on_a_silent_node_are_not_waited_for() -> None:
    """They hold nothing; the first generation would else wait for the whole lease."""
    stage = hosts(1, 1, 1)
    run = stage.train(2)
    stage.started(run)
    stage.ready(run, 0)
    silent(stage, node_of(stage, run, 1))
    assert stage.core.next_due_s is not None
    stage.turn(after_s=BYSTANDER_PATIENCE_S + 0.1)
    assert stage.only(ev.WorkersLost).indices == (1,)
    assert stage.only(ev.WorkersPlanned).placements[0].index == 2


@pytest.mark.parametrize("retries, status", [(0, "lost"), (1, "running")])
def test_a_command_on_a_silent_node_moves_only_after_its_lease(retries: int, status: str) -> None:
    """Never two live attempts of a run that only its user understands."""
    stage = hosts(1, 1)
    run = stage.command(retries=retries)
    stage.started(run)
    away = node_of(stage, run, 0)
    silent(stage, away)
    stage.turn(after_s=WHOLE_LEASE_S - 0.5)
    assert (stage.run(run).status, stage.run(run).attempt) == ("running", 1)
    stage.turn(after_s=0.6)
    assert (stage.run(run).status, stage.run(run).attempt) == (status, 1 + retries)
    if not retries:
        assert stage.run(run).failure.code == "node-lost"
        assert away in stage.run(run).failure.message


def test_why_says_how_long_and_what_to_type_with_the_time_of_asking() -> None:
    """dstack#3405: two different situations, one message."""
    stage = hosts(1, 1)
    run = stage.command(retries=1)
    stage.started(run)
    away = node_of(stage, run, 0)
    silent(stage, away)
    stage.clock.at_s += 40
    reason = stage.core.why(run)
    assert reason.code == "waits-lease"
    assert reason.text == (
        f"its node {away} has not answered for 40s; it moves in 9m 50s, or at once after"
        f" `racimo nodes forget {away} --confirm-dead`"
    )
    lost = stage.command()
    stage.clock.at_s += 40
    assert "moves in 9m 10s" in stage.core.why(run).text
    assert stage.core.why(lost).code == "starts"


def test_a_node_vouched_to_be_dead_frees_its_runs_at_once() -> None:
    stage = hosts(1, 1)
    run = stage.command(retries=1)
    stage.started(run)
    away = node_of(stage, run, 0)
    silent(stage, away)
    with pytest.raises(RacimoError) as caught:
        stage.core.forget_node(away)
    assert "--confirm-dead" in caught.value.hint
    stage.core.forget_node(away, confirm_dead=True)
    stage.turn()
    assert away not in stage.state.nodes
    assert (stage.run(run).attempt, node_of(stage, run, 0) != away) == (2, True)


def test_a_node_that_answers_is_not_forgotten_and_an_unknown_one_is_said() -> None:
    stage = hosts(1, 1)
    for name, code in (("n1", "wrong-state"), ("n9", "node-unknown")):
        with pytest.raises(RacimoError) as caught:
            stage.core.forget_node(name, confirm_dead=True)
        assert caught.value.code == code


def test_what_comes_back_after_it_was_given_up_is_ended_and_changes_nothing() -> None:
    """ray#41437: a job failed on its start time-out started later all the same and held a GPU."""
    stage = hosts(1, 1)
    run = stage.command()
    away = node_of(stage, run, 0)
    silent(stage, away)
    stage.turn(after_s=WHOLE_LEASE_S + 1)
    assert stage.run(run).status == "lost"
    before = stage.state.to_bytes()
    assert not stage.core.agent_event(ev.WorkerStarted(run=run, attempt=1, index=0, pid=9))
    assert stage.state.to_bytes() == before
    stage.turn()
    assert [(effect.node, effect.how) for effect in stage.effects if isinstance(effect, Stop)] == [(away, "abort")]
    assert not stage.state.leases


def test_a_restarted_head_counts_the_lease_from_its_own_start() -> None:
    """The clock between two control processes is the wall's; somebody may have set it forward."""
    stage = hosts(1, 1)
    run = stage.command(retries=1)
    stage.started(run)
    away = node_of(stage, run, 0)
    silent(stage, away)
    stage.clock.at_s += 5_000
    stage.restart()
    stage.core.come_up()
    stage.turn()
    assert stage.run(run).attempt == 1
    stage.turn(after_s=WHOLE_LEASE_S + 0.1)
    assert stage.run(run).retries_used == 1


def test_a_restarted_head_places_nothing_where_nobody_has_answered_yet() -> None:
    stage = hosts(1, 1)
    stage.restart()
    run = stage.command()
    assert stage.core.why(run).code == "waits-nodes"
    stage.core.node_joined(node(1, "n2", address="10.0.0.2"))
    stage.turn()
    assert node_of(stage, run, 0) == "n2"


def test_the_reservation_of_a_run_that_ends_while_its_node_dies_is_not_leaked() -> None:
    """ray#64693: a reservation removed while a node dies leaks."""
    stage = hosts(1, 1)
    run = spread(stage)
    away = node_of(stage, run, 1)
    stage.core.stop(run)
    stage.core.node_silent(away)
    stage.turn()
    stage.exit(run, 0, "killed")
    stage.turn(after_s=BYSTANDER_PATIENCE_S + 0.1)
    assert stage.run(run).status == "stopped"
    assert not stage.state.leases and not stage.state.on_node


def test_the_head_replaced_while_a_run_finishes_records_what_its_node_saw() -> None:
    """ray#65608: the head was replaced, exit 0 was recorded as failed."""
    stage = hosts(1, 1)
    run = stage.command()
    stage.started(run)
    stage.restart()
    away = node_of(stage, run, 0)
    stage.core.node_joined(stage.state.nodes[away])
    stage.core.resync(away, [WorkerState(worker=f"{run}/1/0", pid=1000, exited=True)])
    stage.exit(run, 0)
    assert stage.run(run).status == "succeeded"


def test_going_down_waits_for_nobody_who_does_not_answer() -> None:
    stage = hosts(1, 1)
    near, far = stage.command(), stage.command()
    stage.started(near)
    stage.started(far)
    silent(stage, node_of(stage, far, 0))
    taken = stage.core.take_down()
    stage.turn()
    assert set(taken.stopped) == {near, far}
    assert stage.core.reachable_workers(near) and not stage.core.reachable_workers(far)
    stage.restart()
    stage.core.come_up()
    back = stage.run(far).workers[0].node
    stage.core.node_joined(node(1, back, address="10.0.0.7"))
    stage.core.resync(back, [WorkerState(worker=f"{far}/1/0", pid=1000, exited=False)])
    stage.turn()
    stops = [effect for effect in stage.effects if isinstance(effect, Stop) and effect.worker == f"{far}/1/0"]
    assert "stop" in [effect.how for effect in stops], "told as soon as it can hear it"


def test_an_exact_run_that_would_go_back_to_its_checkpoint_gives_a_lost_node_some_time() -> None:
    """A newcomer is stuck on the only one who holds the newest step: a cut of seconds must not cost the steps."""
    stage = hosts(1, 1)
    run = stage.elastic("1..1")
    stage.turn(after_s=100)
    stage.core.scale(run, WorkerRange(1, 2))
    stage.turn()
    stage.started(run, 1)
    stage.ready(run, 1)
    holder = node_of(stage, run, 0)
    stage.core.node_silent(holder)
    stage.core.node_stuck(holder, f"{run}/1/1")
    stage.turn(after_s=1)
    assert stage.state.nodes[holder].status == "lost"
    assert len(stage.run(run).live_workers) == 2
    assert stage.core.why(run).code == "waits-state"
    stage.turn(after_s=HOLDERS_PATIENCE_S)
    assert members(stage, run) == (1,)


def test_a_head_that_is_cut_off_leaves_training_elsewhere_alone() -> None:
    """Nothing could be done better here, and once the others are back their run has lost no step."""
    stage = hosts(1, 1)
    run = spread(stage)
    silent(stage, "n1", "n2")
    stage.turn(after_s=10 * WHOLE_LEASE_S)
    assert not stage.intents
    assert stage.core.next_due_s is None
    assert "no other machine could take its place" in stage.core.why(run).text
    for number in (1, 2):
        stage.core.node_joined(node(1, f"n{number}", address=f"10.0.0.{number}"))
        mine = [worker.index for worker in stage.run(run).live_workers if worker.node == f"n{number}"]
        states = [WorkerState(worker=f"{run}/1/{index}", pid=1000 + index, exited=False) for index in mine]
        stage.core.resync(f"n{number}", states)
    stage.turn()
    assert (stage.run(run).attempt, members(stage, run)) == (1, (0, 1))
