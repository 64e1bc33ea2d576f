"""How attempts end: commands and torchrun scripts, retries, stop, pause and resume."""

import pytest
from decide_stage import Stage, node

from racimo.control.effects import Start, Stop
from racimo.spec.errors import RacimoError
from racimo.state import events as ev
from racimo.state.nouns import Exit


def hows(stage: Stage) -> list[str]:
    return [effect.how for effect in stage.effects if isinstance(effect, Stop)]


def test_a_command_is_started_and_succeeds() -> None:
    stage = Stage()
    run = stage.command()
    assert [type(effect) for effect in stage.effects] == [Start]
    stage.started(run)
    stage.exit(run, 0)
    assert stage.run(run).status == "succeeded"
    assert stage.run(run).device_s == 2.0
    assert not stage.state.leases


def test_a_failing_worker_takes_its_peers_along_gently() -> None:
    stage = Stage()
    run = stage.command(workers=3)
    stage.exit(run, 1, "failed")
    assert (stage.only(ev.WorkersLeaving).how, stage.only(ev.WorkersLeaving).indices) == ("stop", (0, 2))
    stage.exit(run, 0, "killed")
    assert stage.run(run).status == "running", "not over while one lives"
    stage.exit(run, 2, "finished")
    failure = stage.run(run).failure
    assert stage.run(run).status == "failed"
    assert (failure.code, failure.rank, failure.others) == ("worker-exited", 1, 0)
    assert failure.message == "worker 1 exited with code 1"


def test_retries_are_new_attempts_and_end() -> None:
    stage = Stage()
    run = stage.command(retries=2)
    for attempt in (1, 2):
        stage.exit(run, 0, "failed")
        assert (stage.run(run).attempt, stage.run(run).retries_used) == (attempt + 1, attempt)
    stage.exit(run, 0, "failed")
    assert (stage.run(run).status, stage.run(run).attempt) == ("failed", 3)
    assert "2 of 2 retries used" in stage.run(run).reason.text


def test_a_script_killed_by_a_signal_uses_a_retry_as_under_torchrun() -> None:
    stage = Stage()
    run = stage.train(2, retries=1)
    stage.exit(run, 0, "killed")
    assert stage.only(ev.WorkersLeaving).how == "abort"
    stage.exit(run, 1, "killed")
    assert (stage.run(run).attempt, stage.run(run).retries_used) == (2, 1)


def test_an_unknown_ending_is_lost_and_not_repeated_unless_retries_allow() -> None:
    stage = Stage()
    careful, bold = stage.command(), stage.command(retries=1)
    for run in (careful, bold):
        stage.core.agent_event(ev.WorkerExited(run=run, attempt=1, index=0, exit=Exit(outcome="unknown")))
    stage.turn()
    assert (stage.run(careful).status, stage.run(careful).failure.code) == ("lost", "worker-lost")
    assert (stage.run(bold).status, stage.run(bold).attempt) == ("running", 2)


def test_stopping_ends_workers_with_their_grace_and_the_run_when_they_are_gone() -> None:
    stage = Stage()
    run = stage.command(workers=2, stop_grace="3s")
    stage.core.stop(run)
    stage.turn()
    assert {effect.grace_s for effect in stage.effects if isinstance(effect, Stop)} == {3.0}
    stage.exit(run, 0, "killed")
    assert stage.run(run).status == "stopping"
    stage.exit(run, 1, "finished")
    assert stage.run(run).status == "stopped"
    assert stage.core.state.open_runs == {}


def test_stopping_a_waiting_run_ends_it_at_once() -> None:
    stage = Stage(node(1))
    stage.command()
    run = stage.command()
    stage.core.stop(run)
    stage.turn()
    assert stage.run(run).status == "stopped"


def test_stopping_twice_is_stopping_once_and_what_has_ended_cannot_be_stopped() -> None:
    stage = Stage()
    run = stage.command()
    stage.core.stop(run)
    stage.turn()
    stage.core.stop(run)
    stage.turn()
    assert not stage.intents
    stage.exit(run, 0, "killed")
    with pytest.raises(RacimoError) as caught:
        stage.core.stop(run)
    assert caught.value.code == "wrong-state"


def test_a_command_is_paused_by_freezing_and_keeps_its_devices() -> None:
    stage = Stage(node(2))
    run = stage.command(workers=2)
    stage.core.pause(run)
    stage.turn()
    assert hows(stage) == ["pause", "pause"]
    assert stage.run(run).status == "paused"
    assert "keeps its 2 devices" in stage.core.why(run).text
    assert len(stage.state.leases) == 2
    stage.core.resume(run)
    stage.turn()
    assert hows(stage) == ["thaw", "thaw"]
    assert (stage.run(run).status, stage.run(run).attempt) == ("running", 1)
    stage.core.pause(run)
    stage.turn()
    assert hows(stage) == ["pause", "pause"], "it can be paused again"


def test_a_command_paused_while_it_starts_is_frozen_once_it_has_a_process() -> None:
    stage = Stage()
    run = stage.command()
    stage.core.pause(run)
    stage.turn()
    stage.started(run)
    assert hows(stage) == ["pause"]


def test_a_frozen_run_can_be_stopped() -> None:
    stage = Stage()
    run = stage.command()
    stage.core.pause(run)
    stage.turn()
    stage.core.stop(run)
    stage.turn()
    assert hows(stage) == ["stop", "thaw"], "a frozen process takes its SIGTERM only once it is thawed"
    stage.exit(run, 0, "killed")
    assert stage.run(run).status == "stopped"


def test_a_process_killed_while_frozen_ends_its_run() -> None:
    stage = Stage()
    run = stage.command(workers=2)
    stage.core.pause(run)
    stage.turn()
    stage.exit(run, 0, "killed")
    stage.exit(run, 1, "killed")
    assert (stage.run(run).status, stage.run(run).failure.code) == ("failed", "worker-killed")


def test_a_frozen_run_that_retries_stays_paused() -> None:
    stage = Stage()
    run = stage.command(retries=1)
    stage.core.pause(run)
    stage.turn()
    stage.exit(run, 0, "killed")
    assert (stage.run(run).status, stage.run(run).attempt) == ("paused", 1)
    stage.core.resume(run)
    stage.turn()
    assert (stage.run(run).status, stage.run(run).attempt) == ("running", 2)


def test_an_elastic_run_is_paused_by_saving_and_leaving() -> None:
    stage = Stage(node(2))
    run = stage.elastic(2)
    waiting = stage.command(workers=2)
    stage.core.pause(run)
    stage.turn()
    assert stage.run(run).status == "pausing"
    stage.exit(run, 0, "paused")
    stage.exit(run, 1, "paused")
    assert (stage.run(run).status, stage.run(waiting).status) == ("paused", "running")
    stage.core.resume(run)
    stage.turn()
    assert stage.run(run).status == "queued"
    stage.exit(waiting, 0)
    stage.exit(waiting, 1)
    assert (stage.run(run).status, stage.run(run).attempt, stage.run(run).retries_used) == ("running", 2, 0)


def test_a_death_while_pausing_lets_the_others_finish_their_step_and_save() -> None:
    stage = Stage()
    run = stage.elastic(2)
    stage.core.pause(run)
    stage.turn()
    stage.exit(run, 0, "killed", commits=3)
    assert stage.only(ev.GenerationAnnounced).members == (1,)
    assert not [intent for intent in stage.intents if isinstance(intent, ev.WorkersPlanned)]
    stage.exit(run, 1, "paused")
    assert stage.run(run).status == "paused"


def test_resuming_while_it_still_pauses_queues_it_again_once_it_has_saved() -> None:
    stage = Stage()
    run = stage.elastic(1)
    stage.core.pause(run)
    stage.turn()
    stage.core.resume(run)
    stage.turn()
    stage.exit(run, 0, "paused")
    assert (stage.run(run).status, stage.run(run).attempt) == ("running", 2)


def test_a_waiting_run_is_held_and_lets_others_pass() -> None:
    stage = Stage(node(1))
    first = stage.command()
    held, other = stage.command(), stage.command()
    stage.core.pause(held)
    stage.turn()
    stage.exit(first, 0)
    assert (stage.run(held).status, stage.run(other).status) == ("paused", "running")
    stage.core.resume(held)
    stage.turn()
    assert stage.run(held).status == "queued"


def test_pausing_what_stops_and_resuming_what_runs_are_refused() -> None:
    stage = Stage()
    run = stage.command()
    with pytest.raises(RacimoError, match="not paused"):
        stage.core.resume(run)
    stage.core.stop(run)
    stage.turn()
    with pytest.raises(RacimoError, match="being stopped"):
        stage.core.pause(run)


def test_a_run_that_finishes_before_its_pause_has_succeeded() -> None:
    stage = Stage()
    run = stage.elastic(1)
    stage.core.pause(run)
    stage.turn()
    stage.exit(run, 0, "finished")
    assert stage.run(run).status == "succeeded"


def test_taking_the_cluster_down_keeps_the_queue_and_exact_training_and_stops_the_rest() -> None:
    stage = Stage(node(3))
    training = stage.elastic(workers=2)
    command, waiting = stage.command(), stage.command()
    taken = stage.core.take_down()
    stage.turn()
    assert (set(taken.kept), taken.stopped) == ({training, waiting}, (command,))
    for index in (0, 1):
        stage.exit(training, index, "paused")
    stage.exit(command, 0, "killed")
    assert stage.run(command).status == "stopped"
    assert {stage.run(run).status for run in (training, waiting)} == {"paused"}
    stage.core.come_up()
    stage.turn()
    assert {stage.run(run).status for run in (training, waiting)} == {"running"}
