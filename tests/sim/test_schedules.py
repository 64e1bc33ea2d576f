"""Three hundred histories of a cluster in which everything dies at any moment, and what must hold in each.

Of one machine or of several: cables break both ways or one way and heal, agents fall silent, heads start again,
machines burn, join, are drained and leave. In every one: no run lost, never two live attempts of a run (of an exact one
only where the older is fenced), recorded exits not repeated, devices never leased twice nor on a node that is not
there, steps committed without gaps, nothing held at the end, the state is the fold of the journal, and every run ends.
`racimo.sim.world` raises with the story of the run that shows otherwise.
"""

from collections import Counter
from collections.abc import Iterable

import pytest

from racimo.act.journal import MemoryJournal
from racimo.agent.protocol import AgentEvent
from racimo.control.core import Core
from racimo.decide import away
from racimo.sim.checks import Violated, story
from racimo.sim.control import SimControl
from racimo.sim.machine import AgentDown, SimMachine
from racimo.sim.world import World
from racimo.state import state as state_module
from racimo.state.events import Intent, TrialsProposed
from racimo.state.nouns import Run

NUM_SEEDS = 300


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
    reasons: set[str] = set()
    for seed in range(130):
        world = World(seed)
        world.run()
        deaths.update(world.control.deaths)
        faults.update(world.fate.num_faults)
        records = MemoryJournal(world.control.disk).records()
        intents = [record.event for record in records if isinstance(record.event, Intent)]
        reasons |= {intent.reason.code for intent in intents if not isinstance(intent, TrialsProposed)}
    boundaries = {"append", "appended", "commit", "committed", "effect", "effected", "acknowledge", "acknowledged"}
    assert boundaries <= set(deaths)
    assert {"storm", "agent", "agent in a request", "zygote", "supervisor", "worker", "control"} <= set(faults)
    assert {"host cut", "link cut", "pair cut", "reboot", "machine lost", "drain", "join"} <= set(faults)
    assert {"node-lost", "node-forgotten", "node-drained", "moves", "pair-unreachable", "begins-anew"} <= reasons
    assert {"yields", "preempted", "promoted", "thaws", "begins", "study-complete"} <= reasons


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


def breaks(seeds: Iterable[int] = range(120)) -> bool:
    """True once one of these histories breaks a promise (or never ends, or stumbles)."""
    for seed in seeds:
        try:
            World(seed).run()
        except (Violated, AssertionError, AgentDown):
            return True
    return False


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
    assert breaks()


def test_forgetting_to_look_for_strangers_after_a_restart_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Core, "resync", lambda core, node, workers: None)
    assert breaks()


def test_beginning_a_new_attempt_before_the_old_one_is_gone_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "live_workers", property(lambda run: []))
    assert breaks(range(20))


def test_moving_a_command_before_its_lease_has_ended_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(away, "LEASE_S", 0.0)
    monkeypatch.setattr(away, "LEASE_MARGIN_S", 0.0)
    assert breaks()


def test_placing_work_on_nodes_that_do_not_answer_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "placeable", lambda node: True)
    assert breaks()


def test_never_giving_a_silent_node_up_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(away.Away, "give_up", lambda self: [])
    assert breaks()


def test_acknowledging_before_committing_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    pull = SimMachine.pull

    def forgetful(machine: SimMachine, after: int) -> list[tuple[int, AgentEvent]]:
        events = pull(machine, after)
        if events:
            pull(machine, events[-1][0])
        return events

    monkeypatch.setattr(SimMachine, "pull", forgetful)
    assert breaks()
