from decide_stage import Stage

from racimo.control.effects import Announce, Start
from racimo.state import events as ev


def test_a_command_is_started_and_succeeds() -> None:
    stage = Stage()
    run = stage.command()
    assert [type(effect) for effect in stage.effects] == [Start]
    stage.started(run)
    stage.exit(run, 0)
    assert stage.run(run).status == "succeeded"
    assert not stage.state.leases


def test_a_killed_member_is_replaced_and_the_others_go_on_at_once() -> None:
    stage = Stage()
    run = stage.elastic(2)
    assert stage.run(run).generation.members == (0, 1)
    stage.exit(run, 1, "killed", commits=5)
    assert stage.only(ev.WorkersPlanned).placements[0].index == 2
    assert stage.only(ev.GenerationAnnounced).members == (0,)
    assert {type(effect) for effect in stage.effects} == {Start, Announce}
    stage.started(run, 2)
    stage.ready(run, 2)
    assert stage.run(run).generation.members == (0, 2)
    stage.exit(run, 0)
    stage.exit(run, 2)
    assert stage.run(run).status == "succeeded"
