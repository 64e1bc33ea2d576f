"""Studies in simulated clusters in which things die: no result lost or doubled, and the same decisions as undisturbed.

`racimo.sim.checks.check_study` looks at every history of `test_schedules.py`, too.
"""

from typing import Any

import pytest

from racimo.act.journal import MemoryJournal
from racimo.sim.trials import SimTrials
from racimo.sim.world import World
from racimo.spec.run import RunSpec
from racimo.spec.study import StudySpec
from racimo.state.events import SliceEnded, SliceGranted, TrialsProposed
from racimo.state.nouns import Run
from racimo.state.study import Study

CONTROL = ("control", "control at a boundary", "storm")
PROCESSES = (*CONTROL, "agent", "agent in a request", "zygote", "worker")
SCHEDULERS = ("asha", "freeze-thaw", "population", "median", "none")


def tune(scheduler: str = "asha", parallel: int = 1, **more: Any) -> RunSpec:
    terms = {"trials": 27, "rounds": 9, "retries": 1_000, **more}
    study = StudySpec(
        space={"x": "0.0..1.0"}, metric="loss", proposer="random", scheduler=scheduler, parallel=parallel, **terms
    )
    return RunSpec(tune="t.py:f", study=study, config={"round_s": 0.7, "rounds": 9, "ready_s": 0.5})


def played(seed: int, spec: RunSpec, faults: bool | tuple[str, ...] = True) -> World:
    world = World(seed, specs=(spec,), faults=faults)
    world.run()
    return world


def run_of(world: World) -> tuple[Run, Study]:
    assert world.core is not None
    (run,) = world.core.state.runs.values()
    return run, world.core.state.studies[run.id]


def decisions(world: World) -> list[Any]:
    """What was proposed and which trial went on until when, in order."""
    found: list[Any] = []
    for record in MemoryJournal(world.control.disk).records():
        match record.event:
            case SliceGranted():
                found.append((record.event.grant.trial, record.event.grant.until))
            case TrialsProposed():
                found.append([(proposal.values, proposal.parent) for proposal in record.event.proposals])
            case _:
                pass
    return found


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("seed", range(8))
def test_a_control_process_that_is_killed_decides_as_one_that_is_not(seed: int, scheduler: str) -> None:
    """ray#30861: a restore swapped the searcher for random, or forgot what was pending."""
    spec = tune(scheduler)
    disturbed, undisturbed = played(seed, spec, CONTROL), played(seed, spec, faults=False)
    assert decisions(disturbed) == decisions(undisturbed)
    one, other = (run_of(world)[1].trials for world in (disturbed, undisturbed))
    assert [(t.values, t.curve, t.status) for t in one] == [(t.values, t.curve, t.status) for t in other]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("seed", range(40))
def test_whatever_process_dies_every_result_counts_once(seed: int, scheduler: str) -> None:
    """Two hundred histories; `World.run` holds what the workers did against the journal (syne-tune#214, #445)."""
    world = played(seed, tune(scheduler, parallel=2), PROCESSES)
    run, study = run_of(world)
    assert run.status == "succeeded"
    recorded = [r.event.number for r in MemoryJournal(world.control.disk).records() if isinstance(r.event, SliceEnded)]
    assert len(recorded) == len(set(recorded))
    assert not world.fleet.truth.violations
    assert study.best is not None


def test_the_histories_kill_workers_in_the_middle_of_trials() -> None:
    killed = [played(seed, tune(parallel=2), PROCESSES).fate.num_faults.get("worker", 0) for seed in range(20)]
    assert sum(killed) >= 20


def test_a_worker_that_forgets_what_was_saved_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    take_up = SimTrials._take_up

    def forgetful(trials: SimTrials, worker: Any, order: Any) -> int:
        take_up(trials, worker, order)
        trials._truth.begins(worker, order.grant.trial, 0, may_be_late=False)
        return 0

    monkeypatch.setattr(SimTrials, "_take_up", forgetful)
    with pytest.raises(AssertionError):
        for seed in range(20):
            assert not _violations(seed)


def _violations(seed: int) -> list[tuple[str, str]]:
    world = World(seed, specs=(tune(parallel=2),), faults=PROCESSES)
    while not world._done() and world.timeline.step():
        pass
    return world.fleet.truth.violations
