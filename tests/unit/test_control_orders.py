"""What runs are called, and which rank a worker is shown with."""

import pytest
from decide_stage import Stage, node

from racimo.agent.protocol import WorkerOrder
from racimo.control.orders import run_name
from racimo.control.present import worker_view
from racimo.spec.run import RunSpec


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python slow.py --lr 3", "slow"),
        ("/usr/bin/python3.12 -u -X dev src/My_Job.py", "my-job"),
        ("python -m pkg.tool x", "pkg-tool"),
        ("bash -o pipefail prepare.sh", "prepare"),
        ("python -c print(1)", "python"),
        ("sh -c ./x.sh", "sh"),
        ("python", "python"),
        ("./build.sh python x.py", "build-sh"),
        ("nvidia-smi", "nvidia-smi"),
    ],
)
def test_a_command_is_called_by_its_program_or_the_interpreters_script(command: str, name: str) -> None:
    assert run_name(RunSpec(command=tuple(command.split(" ")))) == name


def test_no_two_workers_are_shown_with_one_rank() -> None:
    """One that died and was replaced has no rank any more: the replacement's may be the number it had."""
    stage = Stage(node(3))
    run = stage.elastic("2..3")
    assert [worker_view(stage.run(run), worker).rank for worker in stage.run(run).workers.values()] == [0, 1, 2]
    stage.exit(run, 0, "killed")
    stage.ready(run, 3)
    ranks = {w.index: worker_view(stage.run(run), w).rank for w in stage.run(run).workers.values()}
    assert ranks == {0: None, 1: 0, 2: 1, 3: 2}
    for index in (1, 3, 2):
        stage.exit(run, index, "finished")
    assert stage.run(run).status == "succeeded"
    assert {w.index: worker_view(stage.run(run), w).rank for w in stage.run(run).workers.values()} == ranks


def orders(stage: Stage, run: str) -> dict[int, WorkerOrder]:
    attempt = stage.run(run).attempt
    return {w.index: stage.core.order_for(f"{run}/{attempt}/{w.index}") for w in stage.run(run).live_workers}


def test_on_one_node_ranks_follow_from_the_rank_alone() -> None:
    stage = Stage(node(4, "n1", address="10.0.0.1"), node(4, "n2", address="10.0.0.2"))
    for order in orders(stage, stage.train(4)).values():
        assert (order.master_address, order.local_rank, order.group_world_size) == ("", None, 1)


def test_over_several_nodes_every_worker_gets_torchruns_places_and_one_rendezvous() -> None:
    """accelerate#2362, #2818: wrong address or process count picked up silently on several machines."""
    stage = Stage(*(node(size, f"n{size}", address=f"10.0.0.{size}") for size in (1, 2, 3)))
    run = stage.train(6)
    found = orders(stage, run)
    nodes = {index: worker.node for index, worker in stage.run(run).workers.items()}
    assert nodes == {0: "n3", 1: "n3", 2: "n3", 3: "n2", 4: "n2", 5: "n1"}, "the largest first"
    assert [found[i].local_rank for i in range(6)] == [0, 1, 2, 0, 1, 0]
    assert [found[i].local_world_size for i in range(6)] == [3, 3, 3, 2, 2, 1]
    assert [found[i].group_rank for i in range(6)] == [0, 0, 0, 1, 1, 2]
    assert {order.group_world_size for order in found.values()} == {3}
    assert {order.master_address for order in found.values()} == {"10.0.0.3"}
    ports = {order.master_port for order in found.values()}
    assert len(ports) == 1 and 20_000 <= ports.pop() < 32_000
    assert {order.world_size for order in found.values()} == {6}


def test_the_next_attempt_meets_at_another_port_and_an_order_is_the_same_whenever_it_is_asked_for() -> None:
    stage = Stage(node(1, "n1", address="10.0.0.1"), node(1, "n2", address="10.0.0.2"))
    run = stage.command(workers=2, retries=1)
    first = orders(stage, run)
    assert first == orders(stage, run)
    stage.exit(run, 0, "failed")
    stage.exit(run, 1, "killed")
    assert orders(stage, run)[0].master_port != first[0].master_port


def test_a_newcomer_on_a_further_node_leaves_the_others_orders_as_they_are() -> None:
    stage = Stage(node(1, "n1", address="10.0.0.1"), node(1, "n2", address="10.0.0.2"), node(1, "n3"))
    run = stage.elastic("2..3")
    stage.core.node_silent("n3")
    before = orders(stage, run)
    stage.exit(run, 2, "killed", commits=1)
    stage.core.node_joined(node(2, "n4", address="10.0.0.4"))
    stage.turn(after_s=1)
    newcomer = max(stage.run(run).workers)
    after = orders(stage, run)
    assert stage.run(run).workers[newcomer].node == "n4"
    assert {index: after[index] for index in (0, 1)} == {index: before[index] for index in (0, 1)}
    assert after[newcomer].local_rank == 0
