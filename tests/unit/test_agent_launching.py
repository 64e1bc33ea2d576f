"""torchrun's contract: what a worker's environment says, on one node and on several."""

import asyncio
import socket
from pathlib import Path

import pytest

from racimo.agent.blobs import BlobStore
from racimo.agent.interfaces import interface_of, listens_already, socket_variables
from racimo.agent.launching import Rendezvous, torchrun_environment
from racimo.agent.protocol import WorkerOrder
from racimo.agent.starting import Starter, StartFailed
from racimo.agent.zygotes import Zygotes
from racimo.spec.home import Home
from racimo.state.nouns import Device, Node


def order(**fields: object) -> WorkerOrder:
    return WorkerOrder(worker="r/1/3", kind="command", rank=3, world_size=5, rendezvous_key="r/1", **fields)  # type: ignore[arg-type]


SPREAD = {
    "master_address": "127.0.0.1", "master_port": 20_001, "local_rank": 1, "local_world_size": 2, "group_rank": 1,
    "group_world_size": 3,
}  # fmt: skip


def test_on_one_node_all_ranks_are_local_ones() -> None:
    given = torchrun_environment(order(), Rendezvous(port=20_001), {})
    assert (given["LOCAL_RANK"], given["LOCAL_WORLD_SIZE"], given["GROUP_WORLD_SIZE"]) == ("3", "5", "1")
    assert (given["MASTER_ADDR"], given["MASTER_PORT"], given["NODE_RANK"]) == ("127.0.0.1", "20001", "0")
    assert not any(name.endswith("SOCKET_IFNAME") for name in given)


def test_across_nodes_place_and_interface_come_from_the_order() -> None:
    """accelerate#2362, #2818: a wrong address or process count was picked up silently on several machines."""
    given = torchrun_environment(order(**SPREAD), Rendezvous(address="10.9.0.1", port=20_001, interface="lo"), {})
    assert (given["RANK"], given["WORLD_SIZE"]) == ("3", "5")
    assert (given["LOCAL_RANK"], given["LOCAL_WORLD_SIZE"]) == ("1", "2")
    assert (given["GROUP_RANK"], given["NODE_RANK"], given["GROUP_WORLD_SIZE"]) == ("1", "1", "3")
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("10.9.0.1", "20001")
    assert {given[f"{part}_SOCKET_IFNAME"] for part in ("GLOO", "NCCL", "TP")} == {"lo"}


def test_what_the_agent_was_started_with_counts_if_there_is_such_an_interface() -> None:
    asked = {"NCCL_SOCKET_IFNAME": "=lo:1", "GLOO_SOCKET_IFNAME": "ib7"}
    chosen = socket_variables("eth-of-the-node", asked)
    assert chosen == {
        "NCCL_SOCKET_IFNAME": "=lo:1", "GLOO_SOCKET_IFNAME": "eth-of-the-node", "TP_SOCKET_IFNAME": "eth-of-the-node",
    }  # fmt: skip


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


def failure_of(tmp_path: Path, node: Node, asked: WorkerOrder) -> str:
    """Why this order cannot start."""

    async def check() -> str:
        home = Home(tmp_path)
        home.node_dir.mkdir(parents=True)
        starter = Starter(home, node, BlobStore(home.node_dir / "blobs"), Zygotes(home, lambda _: None, lambda _: None))
        with pytest.raises(StartFailed) as caught:
            await starter.launch(asked, None)
        assert caught.value.failure.code == "rendezvous-failed"
        return caught.value.failure.message

    return asyncio.run(check())


NODE = Node(id="n", host="alpha", devices=(Device(0),), address="127.0.0.1")


def test_a_taken_port_of_rank_0_is_named_with_its_host(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert listens_already("127.0.0.1", port)
        asked = WorkerOrder(worker="r/1/0", kind="command", command=("true",), **{**SPREAD, "master_port": port})
        message = failure_of(tmp_path, NODE, asked)
    assert message == f"port {port} of alpha (127.0.0.1), where the attempt's workers are to meet, is taken"
    assert not listens_already("127.0.0.1", port)


def test_an_address_that_this_machine_does_not_have_is_refused_before_anybody_waits_for_it(tmp_path: Path) -> None:
    asked = WorkerOrder(worker="r/1/0", kind="command", command=("true",), **{**SPREAD, "master_address": "192.0.2.1"})  # type: ignore[arg-type]
    assert "192.0.2.1:20001, which alpha cannot offer" in failure_of(tmp_path / "a", NODE, asked)
    elsewhere = Node(id="n", host="alpha", devices=(Device(0),), address="192.0.2.7")
    message = failure_of(tmp_path / "b", elsewhere, order(**SPREAD))
    assert message == "alpha is known to others as 192.0.2.7, and none of its network interfaces has that address"
