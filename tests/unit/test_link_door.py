"""The cluster's open port: who is let in as a node, who is not and hears why, and what is told of those inside."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from racimo.act.journal import MemoryDisk, MemoryJournal
from racimo.agent import protocol
from racimo.agent.frames import encode_frame, read_frame
from racimo.control.gate import Gate
from racimo.spec.errors import RacimoError
from racimo.state import events as ev
from racimo.version import PROTOCOL_VERSION
from tests.unit.carrier_stage import SECRET, CarrierStage, LinkedAgent, carrier_stage, pinned
from tests.unit.control_stage import WAIT_S

Check = Callable[[CarrierStage], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Check], None]:
    async def go(check: Check) -> None:
        async with carrier_stage("link", tmp_path) as stage, asyncio.timeout(WAIT_S):
            await check(stage)

    return lambda check: asyncio.run(go(check))


async def _until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def _try_to_join(stage: CarrierStage, *, versions: dict[str, str] | None = None, **hello: Any) -> LinkedAgent:
    """Another machine's agent after its first answer."""
    newcomer = LinkedAgent(stage.home, stage.bind, node="n3", instance="7")
    if versions is not None:
        newcomer.node = msgspec.structs.replace(newcomer.node, versions=versions)
    newcomer.hello = hello
    await newcomer.listen()
    await _until(lambda: newcomer.refusal or newcomer.linked.is_set())
    return newcomer


@pytest.mark.parametrize(
    ("hello", "code", "words"),
    [
        ({"token": "guessed"}, "unauthorized", ["token"]),
        ({"token": ""}, "unauthorized", ["token"]),
        ({"cluster": "another"}, "join-refused", ["another", "cluster cluster"]),
        ({"protocol": PROTOCOL_VERSION + 1}, "version-mismatch", [str(PROTOCOL_VERSION), str(PROTOCOL_VERSION + 1)]),
        ({"wall_s": 1e9}, "clock-off", ["behind", "elsewhere"]),
        ({"versions": {"python": "3.12.1", "torch": "2.13.0"}}, "version-mismatch", ["3.12.1", "3.11.7"]),
        ({"versions": {"python": "3.11.7", "torch": "2.12.1+cpu"}}, "version-mismatch", ["2.12.1", "2.13.0"]),
        ({"versions": {"python": "3.11.7"}}, "version-mismatch", ["torch"]),
    ],
)  # fmt: skip
def test_who_does_not_belong_is_refused_with_the_reason(
    play: Callable[[Check], None], hello: dict[str, Any], code: str, words: list[str]
) -> None:
    async def check(stage: CarrierStage) -> None:
        newcomer = await _try_to_join(stage, **hello)
        assert newcomer.refusal is not None
        assert newcomer.refusal.code == code and newcomer.refusal.hint
        assert all(word in newcomer.refusal.message for word in words), newcomer.refusal.message
        assert "n3" not in stage.core.state.nodes
        assert SECRET not in str(newcomer.refusal)

    play(check)


def test_a_clock_a_minute_off_and_another_patch_version_are_welcome(play: Callable[[Check], None]) -> None:
    async def check(stage: CarrierStage) -> None:
        versions = {"python": "3.11.2", "torch": "2.13.1+cu128"}
        newcomer = await _try_to_join(stage, versions=versions, wall_s=time.time() - 60)
        assert newcomer.refusal is None
        await stage.until_nodes(n3="up")
        await newcomer.die()

    play(check)


def test_a_copy_of_a_node_s_home_is_refused_while_the_first_is_linked(play: Callable[[Check], None]) -> None:
    async def check(stage: CarrierStage) -> None:
        copy = LinkedAgent(stage.home, stage.bind, node="n2", instance="of the copy")
        await copy.listen()
        await _until(lambda: copy.refusal)
        assert copy.refusal is not None and copy.refusal.code == "join-refused"
        assert isinstance(stage.agent, LinkedAgent) and stage.agent.linked.is_set()
        await copy.die()
        await stage.agent.die()
        await _until(lambda: "n2" not in stage.carrier.connected_nodes)
        copy.refusal = None
        await copy.listen()
        await stage.until_nodes(n2="up")
        await copy.die()

    play(check)


def test_the_head_s_own_identity_is_refused(play: Callable[[Check], None]) -> None:
    async def check(stage: CarrierStage) -> None:
        copy = LinkedAgent(stage.home, stage.bind, node="n1")
        await copy.listen()
        await _until(lambda: copy.refusal)
        assert copy.refusal is not None and copy.refusal.code == "join-refused"

    play(check)


def test_the_same_agent_s_newer_link_takes_the_place_of_the_older(play: Callable[[Check], None]) -> None:
    async def check(stage: CarrierStage) -> None:
        first = stage.agent
        assert isinstance(first, LinkedAgent)
        first.dropped.clear()
        again = LinkedAgent(stage.home, stage.bind, node="n2", instance=first.instance)
        dialling = asyncio.create_task(again.link_once())
        await first.dropped.wait()
        await again.linked.wait()
        assert again.refusal is None
        dialling.cancel()

    play(check)


def test_an_agent_that_says_nothing_is_silent_though_its_link_stands(
    play: Callable[[Check], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("racimo.control.carrier_silence.SILENT_AFTER_S", 0.3)
    monkeypatch.setattr("racimo.control.carrier_silence.SILENT_BEATS", 0.3)

    async def check(stage: CarrierStage) -> None:
        assert isinstance(stage.agent, LinkedAgent)
        stage.agent.beating = False
        stage.agent.dropped.clear()
        await stage.until_nodes(n2="silent")
        await stage.agent.dropped.wait()
        stage.agent.beating = True
        await stage.until_nodes(n2="up")

    play(check)


def test_nodes_behind_one_cut_cable_fall_silent_together(
    play: Callable[[Check], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("racimo.control.carrier_silence.SILENT_AFTER_S", 0.8)
    monkeypatch.setattr("racimo.control.carrier_silence.SILENT_BEATS", 1)

    async def check(stage: CarrierStage) -> None:
        others = [LinkedAgent(stage.home, stage.bind, node=node) for node in ("n3", "n4")]
        for agent in others:
            await agent.listen()
        await stage.until_nodes(n2="up", n3="up", n4="up")
        assert isinstance(stage.agent, LinkedAgent)
        stage.agent.beating = False
        await asyncio.sleep(0.2)
        others[0].beating = False
        await stage.until_nodes(n2="silent", n3="silent")
        assert stage.core.state.nodes["n4"].status == "up"
        await _until(lambda: stage.num_records(ev.NodeSilent) >= 2)  # the state is ahead of the journal
        times = [one.at_s for one in stage.core.store.records() if isinstance(one.event, ev.NodeSilent)]
        assert max(times) - min(times) < 0.05, times
        for agent in others:
            await agent.die()

    play(check)


def test_no_link_is_silent_while_bytes_of_an_answer_arrive(
    play: Callable[[Check], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ray#64693: a node counted as dead while it was busy sending."""
    monkeypatch.setattr("racimo.control.carrier_silence.SILENT_AFTER_S", 0.2)
    monkeypatch.setattr("racimo.control.carrier_silence.SILENT_BEATS", 0.2)

    async def check(stage: CarrierStage) -> None:
        assert isinstance(stage.agent, LinkedAgent)
        stage.agent.beating = False
        await stage.agent.linked.wait()
        (writer,) = stage.agent._writers
        frame = encode_frame(protocol.Reply(99, protocol.OutputChunk(content=bytes(1000), size_bytes=1000)))
        for place in range(0, len(frame), len(frame) // 16):
            writer.write(frame[place : place + len(frame) // 16])
            await asyncio.sleep(0.05)
        assert stage.core.state.nodes["n2"].status == "up"

    play(check)


def test_one_who_waits_for_a_worker_on_a_silent_node_is_told_as_its_witness(
    play: Callable[[Check], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("racimo.control.carrier_silence.SILENT_AFTER_S", 0.2)
    monkeypatch.setattr("racimo.control.carrier_silence.SILENT_BEATS", 0.2)

    async def check(stage: CarrierStage) -> None:
        other = LinkedAgent(stage.home, stage.bind, node="n3", num_slots=2)
        await other.listen()
        await stage.until_nodes(n2="up", n3="up")
        run = (await stage.submit("train", workers="4"))["id"]
        await _until(lambda: len(stage.agent.live) == len(other.live) == 2)
        here = next(iter(stage.agent.live))
        there = sorted(int(name.rsplit("/", 1)[1]) for name in other.live)
        assert isinstance(stage.agent, LinkedAgent)
        stage.agent.say(protocol.Wait(worker=here, waits_for=tuple(there), for_s=0.5))
        assert stage.num_records(ev.NodeStuck) == 0
        await other.die()
        await _until(lambda: stage.num_records(ev.NodeStuck))
        stuck = [one.event for one in stage.core.store.records() if isinstance(one.event, ev.NodeStuck)]
        assert [(one.node, one.witness) for one in stuck] == [("n3", here)], run

    play(check)


def test_a_pair_of_nodes_that_cannot_reach_each_other_is_named(
    play: Callable[[Check], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("racimo.control.carrier_silence.PAIR_AFTER_S", 0.1)
    monkeypatch.setattr("racimo.control.carrier_silence.LOOK_AT_PAIRS_EVERY_S", 0.05)

    async def check(stage: CarrierStage) -> None:
        told: list[tuple[str, int, int]] = []
        monkeypatch.setattr(stage.core, "pair_unreachable", lambda run, one, other: told.append((run, one, other)))
        other = LinkedAgent(stage.home, stage.bind, node="n3", num_slots=2)
        await other.listen()
        await stage.until_nodes(n2="up", n3="up")
        run = (await stage.submit("train", workers="4"))["id"]
        await _until(lambda: len(stage.agent.live) == len(other.live) == 2)
        here, there = (int(next(iter(agent.live)).rsplit("/", 1)[1]) for agent in (stage.agent, other))
        assert isinstance(stage.agent, LinkedAgent)
        wait = protocol.Wait(worker=f"{run}/1/{here}", waits_for=(there,), for_s=0.5, unreachable=(there,))
        stage.agent.say(wait)
        await _until(lambda: len(told) >= 2)  # again while it lasts: what the core cannot use yet is dropped there
        assert set(told) == {(run, here, there)}
        await other.die()

    play(check)


def test_the_same_port_answers_https_under_its_own_names_only(play: Callable[[Check], None]) -> None:
    async def check(stage: CarrierStage) -> None:
        headers = dict(stage.http.headers)
        async with httpx.AsyncClient(verify=pinned(stage.home), headers=headers) as client:
            assert (await client.get(f"https://{stage.bind}/v1/nodes")).status_code == 200
            strange = await client.get(f"https://{stage.bind}/v1/nodes", headers={"Host": "evil.example"})
            assert strange.status_code == 400
            no_token = await client.get(f"https://{stage.bind}/v1/nodes", headers={"Authorization": "Bearer no"})
            assert no_token.status_code == 401

    play(check)


def test_visitors_that_say_nothing_or_too_much_are_dropped(
    play: Callable[[Check], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("racimo.control.link_door.HELLO_TIMEOUT_S", 0.1)

    async def check(stage: CarrierStage) -> None:
        assert isinstance(stage.agent, LinkedAgent)
        for words in (b"", protocol.FRAME_HEADER.pack(2**25), encode_frame({"type": "nonsense"})):
            reader, writer = await stage.agent.dial()
            writer.write(words)
            assert await read_frame(reader) is None
            writer.transport.abort()
        host, port = stage.bind.split(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=pinned(stage.home), server_hostname="")
        assert await reader.read() == b""
        writer.transport.abort()

    play(check)


def test_a_door_whose_port_is_taken_says_so_and_opens_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("racimo.control.link_door.LISTEN_AGAIN_S", 0.05)

    async def check() -> None:
        async with carrier_stage("socket", tmp_path) as stage, asyncio.timeout(WAIT_S):
            taken = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
            bind = f"127.0.0.1:{taken.sockets[0].getsockname()[1]}"
            opening = asyncio.create_task(stage.door.run(bind))
            await _until(lambda: stage.door.problem)
            assert isinstance(stage.door.problem, RacimoError) and bind in stage.door.problem.message
            taken.close()
            await taken.wait_closed()
            await _until(lambda: stage.door.problem is None)
            opening.cancel()

    asyncio.run(check())


def test_a_restarted_control_process_has_its_nodes_back_and_loses_nothing(tmp_path: Path) -> None:
    """ray#65608: after the head is replaced, an exit with code 0 is recorded as failed."""
    disk = MemoryDisk()

    async def before() -> str:
        async with carrier_stage("link", tmp_path, MemoryJournal(disk)) as stage, asyncio.timeout(WAIT_S):
            run: str = (await stage.submit("sleep", "9"))["id"]
            await stage.until_started(run)
            return run

    async def after(run: str) -> None:
        async with carrier_stage("socket", tmp_path, MemoryJournal(disk)) as stage, asyncio.timeout(WAIT_S):
            agent = LinkedAgent(stage.home, stage.bind)
            agent.live[f"{run}/1/0"] = 4711
            await agent.listen()
            await _until(lambda: "n2" in stage.carrier.connected_nodes)
            agent.exited(f"{run}/1/0")
            await stage.until(run, "succeeded")
            assert stage.num_records(ev.NodeSilent) == 0
            await agent.die()

    asyncio.run(after(asyncio.run(before())))


def test_the_head_s_end_ends_workers_elsewhere_while_their_agents_dial_on(
    play: Callable[[Check], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("racimo.control.carrier.SHUTDOWN_MOST_S", 0.1)

    async def check(stage: CarrierStage) -> None:
        run = (await stage.submit("sleep", "9"))["id"]
        worker = await stage.until_started(run)
        await stage.carrier.shut_down()
        assert protocol.StopWorker(worker=worker, how="abort") in stage.agent.told
        assert not any(isinstance(one, protocol.Shutdown) for one in stage.agent.told)
        assert "n2" in stage.carrier.connected_nodes

    play(check)


def test_no_name_is_given_before_the_nodes_said_which_they_know(tmp_path: Path) -> None:
    """The head's journal lost the records of runs that another machine still knows."""
    disk = MemoryDisk()

    async def before() -> None:
        async with carrier_stage("link", tmp_path, MemoryJournal(disk)):
            pass

    async def after() -> None:
        async with carrier_stage("socket", tmp_path, MemoryJournal(disk)) as stage, asyncio.timeout(WAIT_S):
            submitting = asyncio.create_task(stage.submit("true"))
            agent = LinkedAgent(stage.home, stage.bind)
            agent.newest_run = 41
            await agent.listen()
            assert int((await submitting)["id"].rpartition("-")[2]) > 41
            await agent.die()

    asyncio.run(before())
    asyncio.run(after())


def test_without_a_word_from_a_node_names_are_given_after_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = MemoryDisk()

    async def before() -> None:
        async with carrier_stage("link", tmp_path, MemoryJournal(disk)):
            pass

    async def after() -> None:
        async with carrier_stage("socket", tmp_path, MemoryJournal(disk)) as stage, asyncio.timeout(WAIT_S):
            assert (await stage.submit("true"))["id"] == "true-1"

    asyncio.run(before())
    monkeypatch.setattr("racimo.control.carrier.MEET_S", 0.3)
    asyncio.run(after())


@pytest.mark.parametrize(
    ("host", "welcome"),
    [
        ("10.0.0.1:7700", True),
        ("head:7700", True),
        ("HEAD.lab.example:7700", True),
        ("127.0.0.1:7700", True),
        ("10.0.0.2:7700", False),
        ("ahead.example:7700", False),
        ("localhost.evil.example", False),
    ],
)
def test_the_open_port_answers_to_the_head_s_own_names(host: str, welcome: bool) -> None:
    async def check() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        transport = httpx.ASGITransport(app=Gate(app, SECRET, ("10.0.0.1",), "head"))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="https://any") as client:
            answer = await client.get("/healthz", headers={"Host": host})
            assert answer.status_code == (204 if welcome else 400), answer.text

    asyncio.run(check())


def test_strangers_that_connect_and_say_nothing_are_bounded_and_agents_come_in_beside_them(
    play: Callable[[Check], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("racimo.control.link_door.MAX_UNMET_OF_ADDRESS", 3)

    async def check(stage: CarrierStage) -> None:
        host, port = stage.bind.split(":")
        strangers = [await asyncio.open_connection(host, int(port), local_addr=("127.0.0.5", 0)) for _ in range(9)]
        turned_away = [asyncio.create_task(reader.read()) for reader, _ in strangers]
        await _until(lambda: sum(task.done() for task in turned_away) == 6)
        newcomer = await _try_to_join(stage)
        await stage.until_nodes(n3="up")
        await newcomer.die()
        for _, writer in strangers:
            writer.transport.abort()
        await asyncio.gather(*turned_away, return_exceptions=True)

    play(check)


async def _say_over_https(stage: CarrierStage, words: bytes) -> bytes:
    """All that comes until the head closes the connection."""
    host, port = stage.bind.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=pinned(stage.home), server_hostname="")
    writer.write(words)
    answer = await reader.read()
    writer.transport.abort()
    return answer


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"200"),
        (b"GET /v1/nodes HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"401"),
        (b"GET /v1/nodes HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"400"),
        (b"POST /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 900000000\r\n\r\n" + b"x" * 200_000, b"401"),
    ],
)  # fmt: skip
def test_who_shows_no_token_is_answered_once_and_keeps_no_connection(
    play: Callable[[Check], None], words: bytes, status: bytes
) -> None:
    async def check(stage: CarrierStage) -> None:
        answer = await _say_over_https(stage, words)
        assert answer.split()[1] == status and b"connection: close" in answer

    play(check)


def test_who_shows_the_token_keeps_the_connection(play: Callable[[Check], None]) -> None:
    async def check(stage: CarrierStage) -> None:
        async with httpx.AsyncClient(verify=pinned(stage.home), headers=dict(stage.http.headers)) as client:
            for path in ("v1/nodes", "healthz", "v1/runs/none"):
                assert "connection" not in (await client.get(f"https://{stage.bind}/{path}")).headers
            assert len(stage.http_server.server_state.connections) == 1

    play(check)


def test_one_address_that_holds_many_connections_is_busy_alone(
    play: Callable[[Check], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("racimo.control.server.MAX_CONNECTIONS_OF_ADDRESS", 2)
    monkeypatch.setattr("racimo.control.server.MAX_SURPLUS", 1)

    async def check(stage: CarrierStage) -> None:
        async def ask(source: str) -> int:
            transport = httpx.AsyncHTTPTransport(verify=pinned(stage.home), local_address=source)
            async with httpx.AsyncClient(transport=transport, headers=dict(stage.http.headers)) as client:
                return (await client.get(f"https://{stage.bind}/v1/nodes")).status_code

        host, port = stage.bind.split(":")
        idle = [
            await asyncio.open_connection(
                host, int(port), ssl=pinned(stage.home), server_hostname="", local_addr=("127.0.0.5", 0)
            )
            for _ in range(2)
        ]
        await _until(lambda: len(stage.http_server.server_state.connections) == 2)
        assert await ask("127.0.0.5") == 503
        assert await ask("127.0.0.6") == 200
        for _, writer in idle:
            writer.transport.abort()

    play(check)


def test_another_machine_with_a_copied_home_does_not_take_the_place_of_a_node_that_is_away(
    play: Callable[[Check], None],
) -> None:
    async def check(stage: CarrierStage) -> None:
        original = stage.agent
        assert isinstance(original, LinkedAgent)
        await original.die()
        await _until(lambda: "n2" not in stage.carrier.connected_nodes)
        copy = LinkedAgent(stage.home, stage.bind, node="n2", instance="of the copy")
        copy.node = msgspec.structs.replace(copy.node, host="another", address="127.0.0.9")
        await copy.listen()
        await _until(lambda: copy.refusal)
        assert copy.refusal is not None and copy.refusal.code == "join-refused"
        assert all(word in copy.refusal.message for word in ("n2", "elsewhere", "another")), copy.refusal
        await original.listen()
        await stage.until_nodes(n2="up")

    play(check)


def test_a_node_that_was_renamed_comes_back(play: Callable[[Check], None]) -> None:
    async def check(stage: CarrierStage) -> None:
        assert isinstance(stage.agent, LinkedAgent)
        stage.agent.node = msgspec.structs.replace(stage.agent.node, host="renamed")
        await stage.agent.cut()
        await _until(lambda: stage.core.state.nodes["n2"].host == "renamed")

    play(check)


def test_a_long_introduction_is_heard_like_a_short_one(
    play: Callable[[Check], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("racimo.control.link_door.SHORT_HELLO_BYTES", 10)

    async def check(stage: CarrierStage) -> None:
        newcomer = await _try_to_join(stage)
        await stage.until_nodes(n3="up")
        await newcomer.die()

    play(check)


def test_after_the_heads_start_nodes_are_away_until_they_have_answered(tmp_path: Path) -> None:
    disk = MemoryDisk()

    async def before() -> None:
        async with carrier_stage("link", tmp_path, MemoryJournal(disk)):
            pass

    async def after() -> None:
        async with carrier_stage("socket", tmp_path, MemoryJournal(disk)) as stage, asyncio.timeout(WAIT_S):

            async def state() -> tuple[str, str]:
                views = {view["node"]["id"]: view["node"] for view in (await stage.http.get("/v1/nodes")).json()}
                return views["n2"].get("status", "up"), (views["n2"].get("reason") or {}).get("code", "")

            assert stage.core.state.nodes["n2"].status == "up"
            assert await state() == ("silent", "node-away")
            agent = LinkedAgent(stage.home, stage.bind)
            await agent.listen()
            await _until(lambda: "n2" not in stage.core.absent)
            assert await state() == ("up", "")
            await agent.die()

    asyncio.run(before())
    asyncio.run(after())


def test_a_node_is_found_by_its_host_where_that_is_plain(play: Callable[[Check], None]) -> None:
    async def check(stage: CarrierStage) -> None:
        for name, words in (("elsewhere", ""), ("elsewhen", "near it: elsewhere"), ("nobody-at-all", "")):
            answer = await stage.http.post(f"/v1/nodes/{name}/drain", json={})
            assert (answer.status_code == 200) == (name == "elsewhere") and words in answer.text
        assert stage.core.state.nodes["n2"].draining
        other = LinkedAgent(stage.home, stage.bind, node="n3")
        await other.listen()
        await stage.until_nodes(n3="up")
        answer = await stage.http.post("/v1/nodes/elsewhere/drain", json={})
        assert "has 2 nodes: n2, n3" in answer.json()["message"]
        await other.die()

    play(check)
