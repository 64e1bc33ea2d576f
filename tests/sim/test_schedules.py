"""Two hundred histories of a cluster in which everything dies at any moment, and what must hold in each.

In every one: no run lost, never two live attempts of a run, recorded exits not repeated, devices never leased twice,
nothing held at the end, the state is the fold of the journal, and every run ends. `racimo.sim.world` raises with the
story of the run that shows otherwise.
"""

from collections import Counter

import pytest

from racimo.act.journal import MemoryJournal
from racimo.agent.protocol import AgentEvent
from racimo.control.core import Core
from racimo.sim.checks import Violated, story
from racimo.sim.control import SimControl
from racimo.sim.machine import AgentDown, SimMachine
from racimo.sim.world import World
from racimo.state.nouns import Run

NUM_SEEDS = 200


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_nothing_is_lost_or_doubled(seed: int) -> None:
    World(seed).run()


def test_the_same_seed_is_the_same_history() -> None:
    """Reproducing a failure needs no more than its seed."""
    first, second = World(7), World(7)
    first.run()
    second.run()
    assert first.control.disk.rows == second.control.disk.rows


def test_the_schedules_reach_every_kind_of_death_and_every_boundary() -> None:
    deaths: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in range(60):
        world = World(seed)
        world.run()
        deaths.update(world.control.deaths)
        faults.update(world.fate.num_faults)
    boundaries = {"append", "appended", "commit", "committed", "effect", "effected", "acknowledge", "acknowledged"}
    assert boundaries <= set(deaths)
    assert {"storm", "agent", "agent in a request", "zygote", "supervisor", "worker", "control"} <= set(faults)


def test_without_faults_everything_ends_as_its_code_says() -> None:
    for seed in range(20):
        World(seed, faults=False).run()


def test_the_story_of_a_run_is_its_own_records_with_reasons() -> None:
    world = World(3)
    world.run()
    assert world.core is not None
    run = next(iter(world.core.state.runs))
    lines = story(MemoryJournal(world.control.disk).records(), run).splitlines()
    assert "RunSubmitted" in lines[0]
    assert "RunEnded" in lines[-1]
    assert " -- " in lines[-1]


def broken_worlds(num: int = 120) -> int:
    """How many of the first histories break a promise (or never end, or stumble)."""
    num_broken = 0
    for seed in range(num):
        try:
            World(seed).run()
        except (Violated, AssertionError, AgentDown):
            num_broken += 1
    return num_broken


def test_acting_before_committing_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(control: SimControl) -> None:
        core = control.core
        assert core is not None
        core.tick()
        effects = [effect for _, effect in core._effects]
        core._effects.clear()
        control._carry_out(effects)
        core.commit()

    monkeypatch.setattr(SimControl, "_settle", careless)
    assert broken_worlds()


def test_forgetting_to_look_for_strangers_after_a_restart_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Core, "resync", lambda core, node, workers: None)
    assert broken_worlds()


def test_beginning_a_new_attempt_before_the_old_one_is_gone_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "live_workers", property(lambda run: []))
    assert broken_worlds(20)


def test_acknowledging_before_committing_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    pull = SimMachine.pull

    def forgetful(machine: SimMachine, after: int) -> list[tuple[int, AgentEvent]]:
        events = pull(machine, after)
        if events:
            pull(machine, events[-1][0])
        return events

    monkeypatch.setattr(SimMachine, "pull", forgetful)
    assert broken_worlds()
