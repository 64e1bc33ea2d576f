"""What is kept of ended runs."""

import pytest
from decide_stage import Stage, node

from racimo.control.effects import Forget
from racimo.decide import retain
from racimo.spec.errors import RacimoError
from racimo.state import events as ev


def test_the_oldest_ended_runs_are_forgotten_and_the_nodes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retain.forget, "__defaults__", (2,))
    stage = Stage(node(1))
    still_running = stage.command()
    stage.exit(still_running, 0)
    ended = [still_running]
    for _ in range(2):
        ended.append(stage.command())
        stage.exit(ended[-1], 0)
    assert stage.only(ev.RunForgotten).run == ended[0]
    assert Forget(node="n1", run=ended[0]) in stage.effects
    assert list(stage.state.runs) == ended[1:]
    with pytest.raises(RacimoError, match="no run"):
        stage.core.run(ended[0])


def test_a_node_that_missed_the_word_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retain.forget, "__defaults__", (0,))
    stage = Stage(node(1))
    run = stage.command()
    stage.exit(run, 0)
    stage.core.resync("n1", ())
    assert Forget(node="n1", run=run) in stage.core.take_effects()


def test_nothing_is_forgotten_below_the_bound() -> None:
    stage = Stage(node(1))
    run = stage.command()
    stage.exit(run, 0)
    assert run in stage.state.runs
