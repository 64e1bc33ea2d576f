"""A stage with one agent under test, reached as the kind says: `socket` is this machine's, `link` dials from another.

With `link` this machine's own agent is there as well, without devices, so that every worker goes to the other one.
"""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from racimo.act.journal import Journal, MemoryJournal
from racimo.act.tls import client_context
from racimo.agent import protocol
from racimo.agent.frames import encode_frame, read_frame
from racimo.control.link_door import LinkDoor
from racimo.control.link_rules import House
from racimo.control.server import Server
from racimo.spec.home import Home
from racimo.state.nouns import Device, Node
from racimo.version import PROTOCOL_VERSION
from tests.unit.control_stage import WAIT_S, FakeAgent, Stage

SECRET = "the-secret-of-this-test"
VERSIONS = {"python": "3.11.7", "torch": "2.13.0+cpu", "racimo": "0.1.0"}
KINDS = ("socket", "link")


class LinkedAgent(FakeAgent):
    """Dials, and dials again until it is told to stop. `hello` holds what differs from an ordinary `LinkHello`."""

    def __init__(self, home: Home, bind: str, *, node: str = "n2", num_slots: int = 2, instance: str = "1") -> None:
        super().__init__(home, num_slots)
        devices = tuple(Device(index) for index in range(num_slots))
        self.node = Node(id=node, host="elsewhere", devices=devices, versions=VERSIONS, address="127.0.0.2")
        self.bind, self.instance = bind, instance
        self.hello: dict[str, Any] = {}
        self.beat = protocol.Beat(number=1)
        self.beating = True
        self.newest_run = 0
        self.refusal: protocol.Refused | None = None
        self.accepted: protocol.LinkAccepted | None = None
        self.linked = asyncio.Event()
        self.dropped = asyncio.Event()
        self._dialling: asyncio.Task[None] | None = None

    async def listen(self) -> None:
        self._dialling = asyncio.create_task(self._dial_for_ever(), name="linked agent")

    async def die(self) -> None:
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.gather(self._dialling, return_exceptions=True)
            self._dialling = None

    def say(self, *waits: protocol.Wait) -> None:
        """What its beats tell from now on."""
        self.beat = protocol.Beat(number=self.beat.number + 1, waits=waits)

    async def cut(self) -> None:
        """The link breaks; it dials again by itself."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _dial_for_ever(self) -> None:
        while self.refusal is None:
            with contextlib.suppress(OSError):
                await self.link_once()
            await asyncio.sleep(0.01)

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.bind.split(":")
        context = client_context(self.home.certificate_file.read_bytes(), (protocol.LINK_ALPN,))
        return await asyncio.open_connection(host, int(port), ssl=context, server_hostname="", limit=2**26)

    async def link_once(self) -> None:
        reader, writer = await self.dial()
        try:
            writer.write(encode_frame(self._introduction()))
            body = await read_frame(reader)
            if body is None:
                return
            answer = msgspec.msgpack.decode(body, type=protocol.LinkAccepted | protocol.Refused)
            if isinstance(answer, protocol.Refused):
                self.refusal = answer
                return
            self.accepted = answer
            self._writers.add(writer)
            self.linked.set()
            await self._work(reader, writer)
        finally:
            self._writers.discard(writer)
            self.linked.clear()
            self.dropped.set()
            writer.transport.abort()

    def _introduction(self) -> protocol.LinkHello:
        states = [protocol.WorkerState(worker=name, pid=pid, exited=False) for name, pid in self.live.items()]
        states += [protocol.WorkerState(worker=name, pid=1, exited=True) for name in self.ended]
        welcome = protocol.ControlWelcome(
            node=self.node, instance=self.instance, workers=tuple(states), newest_run=self.newest_run
        )
        hello = protocol.LinkHello(
            token=SECRET, cluster="cluster", protocol=PROTOCOL_VERSION, wall_s=time.time(), welcome=welcome
        )
        return msgspec.structs.replace(hello, **self.hello)

    async def _work(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks = {asyncio.create_task(self._beat_for_ever(writer))}
        try:
            while (body := await read_frame(reader)) is not None:
                request = msgspec.msgpack.decode(body, type=protocol.Request)
                tasks.add(asyncio.create_task(self._answer(request, writer)))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _beat_for_ever(self, writer: asyncio.StreamWriter) -> None:
        while True:
            if self.beating:
                writer.write(encode_frame(protocol.Reply(0, self.beat)))
            await asyncio.sleep(0.05)


class CarrierStage(Stage):
    """`agent` is the one under test, `bind` where the door is."""

    door: LinkDoor
    bind: str
    http_server: Server

    async def until_nodes(self, **statuses: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while any(node not in self.core.state.nodes for node in statuses) or any(
                self.core.state.nodes[node].status != status for node, status in statuses.items()
            ):
                await asyncio.sleep(0.01)

    def num_records(self, kind: type, run: str = "") -> int:
        """How many events of this kind the journal holds."""
        records = list(self.core.store.records())
        return sum(
            isinstance(record.event, kind) and run in ("", getattr(record.event, "run", "")) for record in records
        )

    async def disconnect(self) -> None:
        """Whatever reaches the agent under test breaks, and comes again."""
        if isinstance(self.agent, LinkedAgent):
            await self.agent.cut()
        else:
            await self.agent.die()
            await self.agent.listen()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def carrier_stage(kind: str, root: Path, journal: Journal | None = None) -> AsyncIterator[CarrierStage]:
    home = Home(root / "head")
    home.root.mkdir(mode=0o700, exist_ok=True)
    own = FakeAgent(home, 2 if kind == "socket" else 0)
    await own.listen()
    made = CarrierStage(home, own, journal or MemoryJournal())
    made.bind = f"127.0.0.1:{free_port()}"
    house = House(secret=SECRET, cluster="cluster", local_node="n1", versions=VERSIONS)
    made.http_server = Server(made.app)
    made.door = LinkDoor(home, made.carrier, lambda: house, made.http_server.protocol)
    tasks = [made.loop.run(), made.carrier.run(), made.door.run(made.bind)]
    parts = [asyncio.create_task(task) for task in tasks]
    try:
        await made.until_nodes(n1="up")
        if kind == "link":
            async with asyncio.timeout(WAIT_S):
                while not home.certificate_file.exists():
                    await asyncio.sleep(0.01)
            made.agent = LinkedAgent(home, made.bind)
            await made.agent.listen()
            await made.until_nodes(n2="up")
        yield made
        for part in parts:
            assert not part.done(), part
    finally:
        await made.http.aclose()
        await made.agent.die()
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        if made.agent is not own:
            await own.die()


def pinned(home: Home) -> ssl.SSLContext:
    return client_context(home.certificate_file.read_bytes())
