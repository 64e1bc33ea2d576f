"""Agents' parts for one another, without the agents: real TLS on loopback, real stores in folders of the test."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from racimo.agent.arrivals import PIECE_BYTES
from racimo.agent.blobs import BlobStore
from racimo.agent.environments import Environments
from racimo.agent.neighbours import Neighbours
from racimo.agent.protocol import FetchBlobs, FetchReply, PeerAddress
from racimo.spec.home import Home
from racimo.state.nouns import Node

SECRET = "a-secret-of-this-test"
BIG = 5 * PIECE_BYTES + 77


def name_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Host:
    """One node's part of it, as its agent uses it."""

    def __init__(self, root: Path, secret: str = SECRET) -> None:
        self.home = Home(root)
        self.home.node_dir.mkdir(parents=True)
        self.home.token_file.write_text(secret)
        self.blobs = BlobStore(self.home.node_dir / "blobs")
        self.neighbours = Neighbours(self.home, self.blobs, Environments(self.home.node_dir / "envs", root.name))
        self.peer = PeerAddress(node=root.name, address="", port=0, pin="")

    async def ask(self, body: Any) -> Any:
        return await self.neighbours.answers[type(body)](body)

    async def open(self) -> None:
        serving = await self.neighbours.serve_at("127.0.0.1")
        self.peer = PeerAddress(node=self.peer.node, address=serving.address, port=serving.port, pin=serving.pin)
        assert serving.of(Node(id="x", host="x", devices=())).peer_port == serving.port > 0

    async def fetch(self, source: "Host", *contents: bytes) -> FetchReply:
        names = tuple(name_of(content) for content in contents)
        reply = await self.ask(FetchBlobs(source=source.peer, sha256s=names))
        assert isinstance(reply, FetchReply)
        return reply

    def has(self, content: bytes) -> bool:
        path = self.blobs.path(name_of(content))
        return path.exists() and path.read_bytes() == content


@asynccontextmanager
async def hosts(tmp_path: Path, count: int) -> AsyncIterator[list[Host]]:
    async with AsyncExitStack() as stack:
        made = [Host(tmp_path / f"h{number}") for number in range(1, count + 1)]
        for host in made:
            stack.push_async_callback(host.neighbours.close)
            await host.open()
        yield made


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scene()

    asyncio.run(bounded())
