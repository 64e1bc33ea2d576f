"""Contents to several nodes: once over the head's link, then from node to node; whoever dies on the way."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from peer_stage import BIG, Host, hosts, name_of, play

from racimo.agent.protocol import FetchBlobs, PutBlob, PutBlobPart
from racimo.control.shipping import Shipping, peer_of
from racimo.control.snapshots import SnapshotStore
from racimo.spec.errors import RacimoError
from racimo.state.nouns import Node


class Cluster:
    """A control process's store and shipping beside hosts; `dead` ones do not answer."""

    def __init__(self, tmp_path: Path, made: list[Host]) -> None:
        self.snapshots = SnapshotStore(tmp_path / "blobs", tmp_path / "snapshots")
        self.hosts = {host.peer.node: host for host in made}
        self.dead: set[str] = set()
        self.local = ""
        self.asked: list[tuple[str, Any]] = []
        self.shipping = Shipping(self.snapshots, self.request, self.sources)

    def keep(self, content: bytes) -> str:
        draft = self.snapshots.draft(name_of(content))
        draft.write(content)
        draft.finish()
        return name_of(content)

    def sources(self) -> list[Node]:
        return [
            Node(
                id=name, host=name, devices=(), address=host.peer.address, peer_port=host.peer.port,
                peer_pin=host.peer.pin,
            )
            for name, host in self.hosts.items() if name not in self.dead and name != self.local
        ]  # fmt: skip

    async def request(self, node: str, body: Any) -> Any:
        self.asked.append((node, body))
        if node in self.dead:
            raise RacimoError("unreachable", f"{node} is dead")
        return await self.hosts[node].ask(body)

    def fetches(self) -> dict[str, str]:
        """Who was told to get something from whom."""
        return {node: body.source.node for node, body in self.asked if isinstance(body, FetchBlobs)}


def test_three_nodes_get_it_over_the_heads_link_once(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 3) as made:
            cluster = Cluster(tmp_path, made)
            contents = [os.urandom(BIG), os.urandom(1000), b""]
            names = [cluster.keep(content) for content in contents]
            await asyncio.gather(*(cluster.shipping.provide(node, names) for node in cluster.hosts))
            assert all(host.has(content) for host in made for content in contents)
            assert cluster.shipping.sent_bytes == BIG + 1000
            assert cluster.fetches() == {"h2": "h1", "h3": "h2"}, "a chain: each link carries it once"

    play(scene)


def test_a_node_that_comes_later_gets_it_from_one_that_has_it(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 2) as made:
            cluster = Cluster(tmp_path, made)
            content = os.urandom(BIG)
            name = cluster.keep(content)
            await cluster.shipping.provide("h1", [name])
            await cluster.shipping.provide("h2", [name])
            assert cluster.shipping.sent_bytes == BIG and made[1].has(content)

    play(scene)


def test_a_control_process_that_has_begun_anew_is_told_who_has_it(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 2) as made:
            cluster = Cluster(tmp_path, made)
            content = os.urandom(BIG)
            name = cluster.keep(content)
            made[0].blobs.put(name, content)
            await cluster.shipping.provide("h2", [name], also_at={"h1", "h2", "gone"})
            assert made[1].has(content) and cluster.shipping.sent_bytes == 0

    play(scene)


def test_the_heads_own_node_gets_it_on_the_spot_and_from_no_other_machine(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 2) as made:
            cluster = Cluster(tmp_path, made)
            cluster.local = "h1"
            content = os.urandom(BIG)
            name = cluster.keep(content)
            await cluster.shipping.provide("h2", [name])
            await cluster.shipping.provide("h1", [name])
            assert made[0].has(content) and not cluster.fetches()

    play(scene)


def test_two_workers_on_one_node_do_not_ask_for_it_twice(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 1) as made:
            cluster = Cluster(tmp_path, made)
            one, two = os.urandom(2000), os.urandom(3000)
            names = [cluster.keep(one), cluster.keep(two)]
            await asyncio.gather(cluster.shipping.provide("h1", names[:1]), cluster.shipping.provide("h1", names))
            assert made[0].has(one) and made[0].has(two)
            assert cluster.shipping.sent_bytes == 5000

    play(scene)


def test_if_the_source_dies_the_control_process_sends_the_rest(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 2) as made:
            cluster = Cluster(tmp_path, made)
            content = os.urandom(BIG)
            name = cluster.keep(content)
            await cluster.shipping.provide("h1", [name])
            await made[0].neighbours.close()
            await cluster.shipping.provide("h2", [name])
            assert made[1].has(content) and cluster.shipping.sent_bytes == 2 * BIG

    play(scene)


def test_a_chain_whose_head_dies_in_the_middle_still_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """h1's link to control breaks while it passes the content on to h2, and h2 to h3."""
    from racimo.agent import arrivals

    monkeypatch.setattr(arrivals, "QUIET_S", 0.2)

    async def scene() -> None:
        async with hosts(tmp_path, 3) as made:
            cluster = Cluster(tmp_path, made)
            content = os.urandom(4 * BIG)
            name = cluster.keep(content)
            provides = {node: asyncio.create_task(cluster.shipping.provide(node, [name])) for node in cluster.hosts}
            while sum(isinstance(body, PutBlobPart) for _, body in cluster.asked) < 6:
                await asyncio.sleep(0)
            cluster.dead.add("h1")
            await made[0].neighbours.close()
            with pytest.raises(RacimoError):
                await provides["h1"]
            await asyncio.gather(provides["h2"], provides["h3"])
            assert made[1].has(content) and made[2].has(content)

    play(scene)


def test_a_refusal_of_the_node_is_the_callers(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 1) as made:
            cluster = Cluster(tmp_path, made)
            name = cluster.keep(b"right")
            cluster.snapshots.blob_path(name).write_bytes(b"wrong")  # a disk that lies
            with pytest.raises(RacimoError, match="SHA-256"):
                await cluster.shipping.provide("h1", [name])
            assert not made[0].has(b"right")
            cluster.snapshots.blob_path(name).write_bytes(b"right")
            await cluster.shipping.provide("h1", [name])
            assert made[0].has(b"right")

    play(scene)


def test_small_contents_share_the_way_and_go_in_one_message_each(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 1) as made:
            cluster = Cluster(tmp_path, made)
            contents = [f"content {number}".encode() for number in range(300)]
            await cluster.shipping.provide("h1", [cluster.keep(content) for content in contents])
            assert sum(isinstance(body, PutBlob) for _, body in cluster.asked) == 300
            assert all(made[0].has(content) for content in contents)

    play(scene)


def test_a_node_without_a_port_for_others_is_no_source() -> None:
    assert peer_of(Node(id="n", host="n", devices=(), address="10.0.0.1")) is None
