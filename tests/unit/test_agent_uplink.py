"""A joined machine's side of the link: dialling for ever, what people may read of it, signs of life, and the lease."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from racimo.act.tls import ensure_head_certificate, make_certificate, server_context
from racimo.agent import lease as leases
from racimo.agent import protocol
from racimo.agent.beats import Waits, beat_for_ever
from racimo.agent.frames import encode_frame, read_frame
from racimo.agent.lease import Lease
from racimo.agent.pulse import Pulse
from racimo.agent.uplink import Uplink, own_address
from racimo.decide import away
from racimo.spec.config import JoinConfig, LinkState
from racimo.spec.home import Home
from racimo.state.lease import LEASE_S
from racimo.state.nouns import Node

WAIT_S = 10.0
NODE = Node(id="n2", host="elsewhere", devices=())


class FakeControl:
    """Takes links as it is told to; `hellos` are all that came."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.hellos: list[protocol.LinkHello] = []
        self.replies: list[protocol.Reply] = []
        self.answer: Any = protocol.LinkAccepted(cluster="c", version="v", beat_busy_s=0.05, beat_idle_s=0.05)
        self.writers: set[asyncio.StreamWriter] = set()
        self.server: asyncio.Server | None = None
        self.port = 0

    async def listen(self) -> None:
        ensure_head_certificate(self.home, "127.0.0.1")
        context = server_context(self.home.certificate_file, self.home.certificate_key_file)
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=context)
        self.port = self.server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        assert self.server is not None
        self.server.close()
        self.cut()

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        try:
            body = await read_frame(reader)
            if body is None:
                return
            self.hellos.append(msgspec.msgpack.decode(body, type=protocol.LinkHello))
            writer.write(encode_frame(self.answer))
            if isinstance(self.answer, protocol.LinkAccepted):
                writer.write(encode_frame(protocol.Request(1, protocol.Usage())))
                while (body := await read_frame(reader)) is not None:
                    self.replies.append(msgspec.msgpack.decode(body, type=protocol.Reply))
        finally:
            self.writers.discard(writer)
            writer.transport.abort()

    @property
    def num_beats(self) -> int:
        return sum(isinstance(reply.body, protocol.Beat) for reply in self.replies)


class Machine:
    """The joined machine around an `Uplink`."""

    def __init__(self, root: Path, control: FakeControl) -> None:
        self.home = Home(root)
        self.home.node_dir.mkdir(parents=True)
        self.home.certificate_file.write_bytes(control.home.certificate_file.read_bytes())
        self.home.token_file.write_text(f"s3cret:{'0' * 64}\n")
        self.workers: Any = SimpleNamespace(live=[], started=Pulse())
        self.waits = Waits(self.workers)
        self.seen_from: list[str] = []
        self.uplink = Uplink(
            self.home,
            JoinConfig(address=f"127.0.0.1:{control.port}", cluster="c"),
            Lease(root / "contact.json", lambda why: None),
            welcome=lambda: protocol.ControlWelcome(node=NODE, instance="1", workers=()),
            answer=self._answer,
            beat=self._beat,
            linked_from=self._linked_from,
        )

    async def _linked_from(self, address: str) -> None:
        self.seen_from.append(address)

    async def _answer(self, body: protocol.RequestBody) -> protocol.ReplyBody:
        return protocol.Ok()

    async def _beat(self, writer: asyncio.StreamWriter, accepted: protocol.LinkAccepted) -> None:
        await beat_for_ever(writer, self.workers, self.waits, busy_s=accepted.beat_busy_s, idle_s=accepted.beat_idle_s)

    @property
    def state(self) -> LinkState | None:
        with contextlib.suppress(FileNotFoundError):
            return msgspec.json.decode(self.home.link_file.read_bytes(), type=LinkState)
        return None

    async def until(self, state: str, code: str = "") -> LinkState:
        while (found := self.state) is None or (found.state, found.code) != (state, code):
            await asyncio.sleep(0.005)
        return found


@asynccontextmanager
async def stage(tmp_path: Path) -> AsyncIterator[tuple[FakeControl, Machine]]:
    control = FakeControl(Home(tmp_path / "head"))
    await control.listen()
    machine = Machine(tmp_path / "node", control)
    running = asyncio.create_task(machine.uplink.run())
    try:
        async with asyncio.timeout(WAIT_S):
            yield control, machine
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await control.die()


async def _until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_an_agent_introduces_itself_answers_and_beats(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as (control, machine):
            await _until(lambda: control.num_beats >= 3)
            hello = control.hellos[0]
            assert (hello.token, hello.cluster, hello.welcome.node) == ("s3cret", "c", NODE)
            assert machine.seen_from == ["127.0.0.1"]
            assert protocol.Reply(1, protocol.Ok()) in control.replies
            assert (await machine.until("up")).head.endswith(str(control.port))

    asyncio.run(check())


def test_a_broken_link_is_dialled_again_for_ever(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as (control, machine):
            for number in range(1, 4):
                await machine.until("up")
                await _until(lambda number=number: len(control.hellos) == number)
                control.cut()
                await machine.until("away", "unreachable")
            await control.die()
            await asyncio.sleep(0.2)
            await control.listen()
            await machine.until("up")

    asyncio.run(check())


def test_a_refusal_is_kept_for_people_and_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("racimo.agent.uplink.REFUSED_PAUSE_S", 0.05)

    async def check() -> None:
        async with stage(tmp_path) as (control, machine):
            await machine.until("up")
            accepted = control.answer
            control.answer = protocol.Refused(code="clock-off", message="the clock is 5 m ahead", hint="timedatectl")
            control.cut()
            state = await machine.until("refused", "clock-off")
            assert (state.message, state.hint) == ("the clock is 5 m ahead", "timedatectl")
            control.answer = accepted
            assert (await machine.until("up")).message == ""

    asyncio.run(check())


def test_another_certificate_than_the_pinned_one_is_refused_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("racimo.agent.uplink.REFUSED_PAUSE_S", 0.05)

    async def check() -> None:
        async with stage(tmp_path) as (control, machine):
            await machine.until("up")
            await control.die()
            seen = len(control.hellos)
            pem, key = make_certificate(["127.0.0.1"])
            control.home.certificate_file.write_bytes(pem)
            control.home.certificate_key_file.write_bytes(key)
            await control.listen()
            await machine.until("refused", "certificate-mismatch")
            assert len(control.hellos) == seen

    asyncio.run(check())


def test_the_way_to_a_host_tells_the_own_address() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("no-such-host.invalid") == ""


def test_opaque_workers_end_once_control_was_not_heard_for_the_lease(tmp_path: Path) -> None:
    async def check() -> None:
        ended: list[str] = []
        lease = Lease(tmp_path / "contact.json", ended.append, lease_s=0.3, look_every_s=0.01)
        watching = asyncio.create_task(lease.watch())
        for _ in range(10):
            await asyncio.sleep(0.05)
            lease.renew()
        assert not ended
        await asyncio.sleep(0.5)
        assert ended and "0.3 s" in ended[0]
        watching.cancel()

    asyncio.run(check())


def test_an_agent_that_starts_anew_does_not_lengthen_the_lease(tmp_path: Path) -> None:
    file = tmp_path / "contact.json"
    Lease(file, lambda why: None).renew()
    noted = msgspec.json.decode(file.read_bytes())
    assert not Lease(file, lambda why: None).over
    file.write_bytes(msgspec.json.encode({**noted, "at_s": leases.now_s() - LEASE_S - 1}))
    assert Lease(file, lambda why: None).over
    file.write_bytes(msgspec.json.encode({"boot": "an earlier one", "at_s": 0.0}))
    assert not Lease(file, lambda why: None).over


class Worker(SimpleNamespace):
    """What `Waits` looks at of an entry."""


def _worker(**progress: Any) -> Worker:
    return Worker(
        name="r-1/1/0", progress=protocol.Progress(worker="r-1/1/0", **progress), progress_at_s=leases.time.monotonic()
    )


def test_a_wait_that_lasts_is_beaten_at_once_and_a_short_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("racimo.agent.beats.WAIT_COUNTS_AFTER_S", 0.1)

    async def check() -> None:
        worker = _worker()
        workers: Any = SimpleNamespace(live=[worker])
        waits = Waits(workers)

        def say(**progress: Any) -> None:
            worker.progress = protocol.Progress(worker=worker.name, **progress)
            worker.progress_at_s = leases.time.monotonic()
            waits.note(worker)

        say(waits_for=(1,))
        await asyncio.sleep(0.02)
        say()
        assert not await waits.changed.wait(0.2)
        say(waits_for=(1,), unreachable=(1,))
        assert await waits.changed.wait(1.0)
        (wait,) = waits.now()
        assert (wait.worker, wait.waits_for, wait.unreachable) == ("r-1/1/0", (1,), (1,))
        assert 0.08 < wait.for_s < 0.5
        say()
        assert await waits.changed.wait(1.0)
        assert waits.now() == ()
        waits.close()

    asyncio.run(check())


def test_control_waits_longer_for_a_lease_than_the_agent_does() -> None:
    assert away.LEASE_MARGIN_S > 2 * leases.LOOK_EVERY_S
