"""Two nodes that answer but do not reach each other: who goes, who stays, and no coming and going."""

from decide_stage import Stage, node

from racimo.decide.fit import PAIR_FRESH_S
from racimo.state import events as ev


def hosts(*sizes: int) -> Stage:
    return Stage(*(node(size, f"n{number}", address=f"10.0.0.{number}") for number, size in enumerate(sizes, 1)))


def node_of(stage: Stage, run: str, index: int) -> str:
    return str(stage.run(run).workers[index].node)


def members(stage: Stage, run: str) -> tuple[int, ...]:
    generation = stage.run(run).generation
    return () if generation is None else generation.members


def cut(stage: Stage, run: str, *pairs: tuple[int, int]) -> None:
    for one, other in pairs:
        stage.core.pair_unreachable(run, one, other)
    stage.turn()


def test_one_of_the_two_is_let_go_and_both_nodes_are_named() -> None:
    stage = hosts(1, 1)
    run = stage.elastic(2)
    cut(stage, run, (0, 1))
    leaving = stage.only(ev.WorkersLeaving)
    assert (leaving.how, leaving.indices, leaving.reason.code) == ("release", (1,), "pair-unreachable")
    assert node_of(stage, run, 0) in leaving.reason.text and node_of(stage, run, 1) in leaving.reason.text
    assert members(stage, run) == (0,)
    cut(stage, run, (1, 0))
    assert not stage.intents, "the other side says it too: never both"


def test_the_replacement_is_not_placed_where_the_pair_would_come_again() -> None:
    stage = hosts(1, 1)
    run = stage.elastic(2)
    first, second = node_of(stage, run, 0), node_of(stage, run, 1)
    cut(stage, run, (0, 1))
    stage.exit(run, 1, "released")
    stage.turn(after_s=PAIR_FRESH_S / 2)
    assert not stage.intents
    reason = stage.core.why(run)
    assert (reason.code, first in reason.text, second in reason.text) == ("waits-pair", True, True)
    assert stage.core.next_due_s is not None
    stage.turn(after_s=stage.core.next_due_s - stage.clock.at_s + 0.01)
    assert stage.only(ev.WorkersPlanned).placements[0].node == second, "tried again once it is no news any more"


def test_a_third_node_that_both_reach_is_taken_at_once() -> None:
    stage = hosts(1, 1, 1)
    run = stage.elastic(2)
    cut(stage, run, (0, 1))
    taken = stage.only(ev.WorkersPlanned).placements[0].node
    assert taken not in (node_of(stage, run, 0), node_of(stage, run, 1))


def test_the_node_that_more_others_do_not_reach_is_the_one() -> None:
    stage = hosts(1, 1, 1)
    run = stage.elastic(3)
    cut(stage, run, (1, 0), (2, 0))
    assert stage.only(ev.WorkersLeaving).indices == (0,)
    assert members(stage, run) == (1, 2)


def test_all_workers_that_cannot_reach_over_a_broken_pair_of_nodes_go_from_one_side() -> None:
    stage = hosts(2, 2)
    run = stage.elastic(4)
    sides: dict[str, list[int]] = {}
    for worker in stage.run(run).live_workers:
        sides.setdefault(worker.node, []).append(worker.index)
    one, other = sides.values()
    cut(stage, run, *((a, b) for a in one for b in other))
    assert members(stage, run) in (tuple(one), tuple(other))


def test_two_workers_of_one_node_or_of_a_silent_one_are_no_such_pair() -> None:
    stage = hosts(2, 2)
    run = stage.elastic(2)
    seq = stage.state.seq
    stage.core.pair_unreachable(run, 0, 1)
    assert stage.state.seq == seq
    other = stage.elastic("2..2", devices="cpu:2")
    stage = hosts(1, 1)
    other = stage.elastic(2)
    stage.core.node_silent(node_of(stage, other, 1))
    seq = stage.state.seq
    stage.core.pair_unreachable(other, 0, 1)
    assert stage.state.seq == seq


def test_a_gang_is_not_begun_on_two_nodes_that_do_not_reach_each_other() -> None:
    stage = hosts(1, 1, 1)
    run = stage.elastic("1..2")
    apart = {node_of(stage, run, 0), node_of(stage, run, 1)}
    cut(stage, run, (0, 1))
    for worker in stage.run(run).live_workers:
        stage.exit(run, worker.index, "finished", turn=False)
    stage.turn()
    for _ in range(3):
        gang = stage.train(2)
        assert {worker.node for worker in stage.run(gang).live_workers} != apart
        for worker in stage.run(gang).live_workers:
            stage.exit(gang, worker.index)
