"""Elastic training runs: generations, replacements, growth, release, and when healing must stop."""

import pytest
from decide_stage import Stage, node

from racimo.control.effects import Announce, Start, Stop
from racimo.spec.quantity import WorkerRange
from racimo.state import events as ev
from racimo.state.nouns import Exit, Failure


def members(stage: Stage, run: str) -> tuple[int, ...]:
    generation = stage.run(run).generation
    return () if generation is None else generation.members


def test_the_first_generation_waits_until_every_worker_is_ready() -> None:
    stage = Stage()
    run = stage.train(2)
    stage.started(run)
    stage.ready(run, 1)
    assert members(stage, run) == ()
    stage.ready(run, 0)
    assert members(stage, run) == (0, 1)
    announced = [effect for effect in stage.effects if isinstance(effect, Announce)]
    assert [member.address for member in announced[0].members] == ["a:0", "a:1"]


def test_a_killed_member_is_replaced_and_the_others_go_on_at_once() -> None:
    """torchft#63: a killed member was never forgotten, so no new group formed."""
    stage = Stage()
    run = stage.elastic(2)
    stage.exit(run, 1, "killed", commits=5)
    assert stage.only(ev.WorkersPlanned).placements[0].index == 2
    assert stage.only(ev.GenerationAnnounced).members == (0,)
    assert {type(effect) for effect in stage.effects} == {Start, Announce}
    stage.started(run, 2)
    stage.ready(run, 2)
    assert members(stage, run) == (0, 2)
    stage.exit(run, 0)
    stage.exit(run, 2)
    assert stage.run(run).status == "succeeded"


def test_fewer_than_least_go_on_and_the_reason_says_so() -> None:
    stage = Stage()
    run = stage.elastic(2)
    stage.exit(run, 0, "killed", commits=1)
    assert "worker 0 was killed by signal 9" in stage.only(ev.GenerationAnnounced).reason.text
    assert "fewer than the 2 asked for" in stage.only(ev.GenerationAnnounced).reason.text


def test_generation_numbers_never_repeat_across_attempts() -> None:
    stage = Stage()
    run = stage.elastic(1)
    assert stage.run(run).generation.number == 1
    stage.exit(run, 0, "killed", commits=1)
    stage.started(run)
    stage.ready(run)
    assert (stage.run(run).attempt, stage.run(run).generation.number) == (2, 2)


def test_a_run_grows_to_its_most_when_nothing_waits() -> None:
    """dlrover#1534: scaling up stayed stuck for minutes."""
    stage = Stage(node(4))
    first = stage.command(workers=2)
    run = stage.elastic("1..4")
    assert len(stage.run(run).live_workers) == 2
    stage.exit(first, 0)
    stage.exit(first, 1)
    assert stage.only(ev.WorkersPlanned).reason.text == "from 3 to 4 workers: devices are free and nothing waits"
    assert len(stage.run(run).live_workers) == 4


def test_growth_leaves_devices_to_those_who_wait() -> None:
    stage = Stage(node(3))
    first = stage.command(workers=1)
    run = stage.elastic("1..3")
    waiting = stage.command(workers=2)
    assert stage.run(waiting).status == "queued"
    stage.exit(first, 0)
    assert len(stage.run(run).live_workers) == 2
    assert "needs 2 devices, 1 of 3 free" in stage.core.why(waiting).text


def test_growth_stops_at_the_number_of_micro_shards() -> None:
    stage = Stage(node(4))
    first = stage.command(workers=2)
    run = stage.train("1..4")
    stage.started(run)
    stage.ready(run, micro_shards=2)
    stage.exit(first, 0)
    stage.exit(first, 1)
    assert len(stage.run(run).live_workers) == 2


def test_scaling_down_releases_the_newest_and_the_rest_go_on() -> None:
    """horovod#3399: a node that left gracefully made trained samples repeat; here it leaves between two steps."""
    stage = Stage(node(4))
    run = stage.elastic("1..4")
    stage.core.scale(run, WorkerRange(1, 2))
    stage.turn()
    assert stage.only(ev.WorkersLeaving).indices == (2, 3)
    assert stage.only(ev.WorkersLeaving).how == "release"
    assert stage.only(ev.GenerationAnnounced).members == (0, 1)
    stage.exit(run, 3, "released")
    stage.exit(run, 2, "released")
    assert (stage.run(run).status, len(stage.run(run).live_workers)) == ("running", 2)


def test_scaling_up_the_least_gets_devices_before_runs_behind_it() -> None:
    stage = Stage(node(3))
    run = stage.elastic("1..1")
    stage.core.scale(run, WorkerRange(3, 3))
    stage.turn()
    assert len(stage.run(run).live_workers) == 3


def test_a_newcomer_that_dies_before_it_is_ready_is_started_again_ever_more_slowly() -> None:
    stage = Stage(node(2))
    run = stage.elastic("1..2")
    stage.exit(run, 1, "killed", commits=1)
    delays = []
    for _ in range(3):
        newest = stage.run(run).next_index - 1
        stage.exit(run, newest, "killed", commits=1)
        assert stage.core.next_due_s is not None
        delays.append(round(stage.core.next_due_s - stage.clock.at_s, 1))
        stage.turn(after_s=delays[-1] + 0.01)
        assert stage.only(ev.WorkersPlanned)
    assert delays == [0.5, 1.0, 2.0]
    assert stage.run(run).status == "running", "a member goes on, so this is no crash loop"


def test_once_a_member_has_finished_nothing_grows_or_heals() -> None:
    stage = Stage(node(4))
    run = stage.elastic("2..3")
    stage.exit(run, 0)
    stage.exit(run, 1, "killed", commits=9)
    assert not [intent for intent in stage.intents if isinstance(intent, ev.WorkersPlanned)]
    assert members(stage, run) == (2,)


def test_a_newcomer_is_not_needed_once_a_member_has_finished() -> None:
    stage = Stage(node(2))
    run = stage.elastic(2)
    stage.exit(run, 1, "killed", commits=1)
    stage.started(run, 2)
    stage.exit(run, 0)
    assert stage.only(ev.WorkersLeaving).how == "abort"
    stage.exit(run, 2, "killed")
    assert stage.run(run).status == "succeeded"


def test_a_member_killed_after_the_others_finished_makes_the_run_end_again_from_its_checkpoint() -> None:
    """It may have been the one that was writing the result."""
    stage = Stage()
    run = stage.elastic(2)
    stage.exit(run, 1, turn=False)
    stage.exit(run, 0, "killed", commits=9)
    assert stage.only(ev.RunRequeued).reason.code == "died-at-the-end"
    assert (stage.run(run).attempt, stage.run(run).retries_used) == (2, 0)


def test_when_all_die_the_run_goes_on_from_its_checkpoint_and_it_is_no_retry() -> None:
    stage = Stage()
    run = stage.elastic(2)
    stage.exit(run, 0, "killed", commits=7, turn=False)
    stage.exit(run, 1, "killed", commits=7)
    assert "newest checkpoint" in stage.only(ev.RunRequeued).reason.text
    assert stage.only(ev.AttemptPlanned).attempt == 2
    assert stage.run(run).retries_used == 0


def test_newcomers_do_not_go_on_where_nobody_is_left_who_holds_the_state() -> None:
    stage = Stage()
    run = stage.elastic(2)
    stage.exit(run, 0, "killed", commits=7)
    stage.started(run, 2)
    stage.exit(run, 1, "killed", commits=8)
    assert [leaving.how for leaving in stage.intents if isinstance(leaving, ev.WorkersLeaving)] == ["abort"]
    for worker in stage.run(run).live_workers:
        stage.exit(run, worker.index, "killed", commits=8)
    assert stage.run(run).attempt == 2


def test_five_deaths_without_a_new_step_are_a_crash_loop() -> None:
    stage = Stage()
    run = stage.elastic(1)
    for death in range(5):
        assert stage.run(run).status == "running", death
        stage.clock.at_s += 5
        stage.exit(run, 0, "killed", commits=3)
        if death < 4:
            stage.started(run)
            stage.ready(run)
    # The first death at step 3 was progress; four more without any, and one is missing.
    assert stage.run(run).status == "failed"
    assert stage.run(run).failure.code == "crash-loop"
    assert "5 times without one new step" in stage.run(run).failure.message


def test_progress_between_deaths_is_no_crash_loop() -> None:
    stage = Stage()
    run = stage.elastic(1)
    for death in range(12):
        stage.clock.at_s += 5
        stage.exit(run, 0, "killed", commits=death + 1)
        stage.started(run)
        stage.ready(run)
    assert stage.run(run).status == "running"


def test_workers_that_die_together_count_once() -> None:
    """One dead zygote takes all its workers along: that is one cause, not a crash loop."""
    stage = Stage(node(8))
    run = stage.elastic(8)
    for index in range(8):
        stage.exit(run, index, "killed", commits=0)
    assert stage.run(run).deaths_without_progress == 1
    for worker in stage.run(run).live_workers:
        stage.exit(run, worker.index, "killed")
    assert (stage.run(run).status, stage.run(run).attempt) == ("running", 2)


def test_a_worker_killed_before_it_is_ready_again_costs_an_exact_run_no_retry() -> None:
    stage = Stage()
    run = stage.elastic(1)
    stage.exit(run, 0, "killed", commits=3)
    stage.clock.at_s += 5
    stage.exit(run, 0, "killed", commits=3)
    assert (stage.run(run).status, stage.run(run).attempt, stage.run(run).retries_used) == ("running", 3, 0)


@pytest.mark.parametrize("outcome, code", [("failed", "worker-raised"), ("killed", "out-of-memory")])
def test_what_the_users_code_does_wrong_ends_the_run_instead_of_healing(outcome: str, code: str) -> None:
    stage = Stage()
    run = stage.elastic(3)
    stage.exit(run, 1, outcome, code=code, commits=3)  # type: ignore[arg-type]
    assert (stage.only(ev.WorkersLeaving).how, stage.only(ev.WorkersLeaving).indices) == ("abort", (0, 2))
    stage.exit(run, 0, "killed")
    stage.exit(run, 2, "killed")
    ended = stage.run(run)
    assert (ended.status, ended.failure.code, ended.failure.rank, ended.failure.others) == ("failed", code, 1, 0)


def test_the_first_to_fail_is_named_and_the_others_counted() -> None:
    stage = Stage()
    run = stage.elastic(3)
    for index in (2, 0, 1):
        stage.exit(run, index, "failed", code="worker-raised", turn=False)
    stage.turn()
    failure = stage.run(run).failure
    assert (failure.rank, failure.others) == (2, 2)
    assert "2 workers more failed" in stage.run(run).reason.text


def test_a_hung_worker_ends_the_attempt_with_its_own_report() -> None:
    """pytorch#118369: a hang, and nobody could tell which rank."""
    stage = Stage()
    run = stage.elastic(2, retries=1)
    for attempt in (1, 2):
        failure = Failure(code="worker-hung", message="rank 1 waits in line 7", rank=1)
        hung = ev.WorkerHung(run=run, attempt=attempt, index=1, failure=failure)
        assert stage.core.agent_event(hung)
        assert not stage.core.agent_event(hung), "said twice"
        stage.turn()
        assert stage.only(ev.WorkersLeaving).how == "abort"
        stage.exit(run, 0, "killed", turn=False)
        stage.exit(run, 1, "killed")
        if attempt == 1:
            assert stage.only(ev.RunRequeued).retry
            stage.started(run)
            stage.ready(run)
    assert (stage.run(run).status, stage.run(run).failure.code) == ("failed", "worker-hung")


def test_a_run_that_hangs_while_it_pauses_is_not_waited_for_forever() -> None:
    stage = Stage()
    run = stage.elastic(2)
    stage.core.pause(run)
    stage.turn()
    failure = Failure(code="worker-hung", message="rank 1 waits in line 7", rank=1)
    assert stage.core.agent_event(ev.WorkerHung(run=run, attempt=1, index=1, failure=failure))
    stage.turn()
    assert stage.only(ev.WorkersLeaving).how == "abort"


def test_a_worker_that_always_dies_before_the_first_generation_is_a_crash_loop() -> None:
    stage = Stage()
    run = stage.train(2)
    stage.started(run)
    stage.ready(run, 0)
    for death in range(5):
        assert stage.run(run).status == "running", death
        others = [worker.index for worker in stage.run(run).live_workers if worker.index != 0]
        stage.exit(run, others[0], "killed")
        stage.turn(after_s=40)
    stage.exit(run, 0, "killed")
    assert stage.run(run).failure.code == "crash-loop"


def test_a_newcomer_that_cannot_even_be_started_does_not_end_a_healthy_run() -> None:
    stage = Stage()
    run = stage.elastic(2)
    stage.exit(run, 0, "killed", commits=3)
    stage.exit(run, 2, "failed", code="disk-full", commits=4)
    assert stage.run(run).status == "running"
    assert members(stage, run) == (1,)
    stage.turn(after_s=1)
    assert "from 1 to 2 workers" in stage.only(ev.WorkersPlanned).reason.text


def test_the_first_workers_that_cannot_be_started_end_the_run_with_the_reason() -> None:
    stage = Stage()
    run = stage.train(2)
    stage.exit(run, 0, "failed", code="environment-failed")
    stage.exit(run, 1, "killed")
    assert stage.run(run).failure.code == "environment-failed"


@pytest.mark.parametrize("trained_before", [False, True])
def test_a_run_begins_without_a_worker_that_its_node_cannot_start_if_enough_others_are_there(
    trained_before: bool,
) -> None:
    """One machine's full disk is no reason for five others not to begin."""
    stage = Stage(node(2, "n1"), node(1, "n2"))
    run = stage.train("2..3")
    if trained_before:
        stage.started(run)
        stage.ready(run)
        for index in range(3):
            stage.exit(run, index, "killed", commits=7, turn=False)
        stage.turn()
        assert stage.run(run).attempt == 2
    attempt = stage.run(run).attempt
    absent = next(worker.index for worker in stage.run(run).live_workers if worker.node == "n2")
    stage.exit(run, absent, "failed", code="disk-full")
    assert not stage.intents
    stage.started(run)
    stage.ready(run)
    others = tuple(sorted({0, 1, 2} - {absent}))
    assert (stage.run(run).attempt, members(stage, run)) == (attempt, others)
    reason = stage.only(ev.GenerationAnnounced).reason.text
    assert (
        reason
        == f"2 of 3 workers are ready: worker {absent} could not be started on n2 (worker {absent} says disk-full)"
    )
    assert stage.only(ev.WorkersPlanned).placements[0].node == "n2", "it is tried again beside those that train"


def test_what_no_node_can_start_ends_the_run_once_too_few_are_left() -> None:
    stage = Stage(node(1, "n1"), node(1, "n2"), node(1, "n3"))
    run = stage.train("2..3")
    stage.exit(run, 0, "failed", code="environment-failed")
    assert stage.run(run).status == "running"
    stage.exit(run, 2, "failed", code="environment-failed")
    stage.exit(run, 1, "killed")
    assert stage.run(run).failure.code == "environment-failed"
    assert stage.run(run).status == "failed"


@pytest.mark.parametrize("code", ["file-missing", "module-missing", "syntax-error"])
def test_what_every_node_would_lack_ends_the_run_at_the_first_word_of_it(code: str) -> None:
    stage = Stage(node(1, "n1"), node(1, "n2"), node(1, "n3"))
    run = stage.train("2..3")
    stage.exit(run, 0, "failed", code=code)
    assert stage.only(ev.WorkersLeaving).how == "stop"


def test_a_script_without_generations_is_not_done_if_one_of_its_workers_never_began() -> None:
    stage = Stage(node(1, "n1"), node(1, "n2"), node(1, "n3"))
    run = stage.train("2..3")
    stage.exit(run, 0, "failed", code="disk-full")
    stage.started(run)
    stage.exit(run, 1)
    stage.exit(run, 2)
    assert (stage.run(run).status, stage.run(run).failure.code) == ("failed", "disk-full")


def test_a_newcomer_of_another_numerics_class_is_refused_and_no_other_is_tried() -> None:
    stage = Stage(node(3))
    run = stage.elastic(2)
    stage.exit(run, 1, "killed", commits=1)
    stage.started(run, 2)
    event = ev.WorkerReady(run=run, attempt=1, index=2, address="a:2", micro_shards=8, numerics="other")
    stage.core.agent_event(event)
    stage.turn()
    assert (stage.only(ev.WorkersLeaving).how, stage.only(ev.WorkersLeaving).indices) == ("abort", (2,))
    assert stage.only(ev.WorkersLeaving).reason.code == "numerics-class"
    assert members(stage, run) == (0,)
    stage.exit(run, 2, "killed")
    stage.turn(after_s=100)
    assert not stage.intents
    assert stage.run(run).status == "running"


def test_a_run_that_heals_for_months_does_not_remember_all_its_dead() -> None:
    stage = Stage(node(2))
    run = stage.elastic(2)
    for death in range(150):
        newest = max(worker.index for worker in stage.run(run).live_workers)
        stage.exit(run, newest, "killed", commits=death + 1)
        stage.started(run, stage.run(run).next_index - 1)
        stage.ready(run, stage.run(run).next_index - 1)
    assert len(stage.run(run).workers) <= 103
    assert members(stage, run) == (0, 151)
    assert stage.run(run).device_s == 300.0


def test_an_unknown_ending_heals_like_a_kill() -> None:
    stage = Stage()
    run = stage.elastic(2)
    stage.core.agent_event(ev.WorkerExited(run=run, attempt=1, index=0, exit=Exit(outcome="unknown"), commits=4))
    stage.turn()
    assert stage.only(ev.GenerationAnnounced).members == (1,)
    assert "worker 0 vanished" in stage.only(ev.GenerationAnnounced).reason.text


def test_a_replacement_needs_no_stop_of_anybody() -> None:
    stage = Stage()
    run = stage.elastic(3)
    stage.exit(run, 1, "killed", commits=2)
    assert not [effect for effect in stage.effects if isinstance(effect, Stop)]


def test_a_member_with_another_address_is_announced_again_in_the_same_generation() -> None:
    stage = Stage(node(1, "n1"), node(1, "n2"))
    run = stage.elastic(2)
    stage.core.agent_event(
        ev.WorkerReady(run=run, attempt=1, index=1, address="elsewhere", micro_shards=8, numerics="n")
    )
    stage.turn()
    announced = [effect for effect in stage.effects if isinstance(effect, Announce)]
    assert {effect.node for effect in announced} == {"n1", "n2"}
    assert all(effect.number == 1 and effect.members[1].address == "elsewhere" for effect in announced)
