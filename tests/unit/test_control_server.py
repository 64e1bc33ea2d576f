"""The API over a real socket: what an in-process client does not show."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from control_stage import HEADERS, Stage, stage

from racimo.control import service_log
from racimo.control.server import Server, listen
from racimo.control.views import LogLine


@asynccontextmanager
async def served(made: Stage) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    listener = listen(0)
    server = Server(made.app)
    serving = asyncio.create_task(server.serve([listener]))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=address, headers=HEADERS, trust_env=False) as client:
            yield server, client
    finally:
        server.stop()
        await serving


def test_answers_do_not_wait_for_acknowledgements(tmp_path: Path) -> None:
    """Nagle's algorithm would hold each answer's body back for 40 ms."""

    async def check() -> None:
        async with stage(tmp_path) as made, served(made) as (server, client):
            assert (await client.get("/v1/runs")).status_code == 200
            (connection,) = server.server_state.connections
            own_end = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert own_end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0

    asyncio.run(check())


def test_a_follower_that_leaves_is_forgotten(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made, served(made) as (_, client):
            run = (await made.submit("sleep"))["id"]
            made.agent.print(await made.until_started(run), b"first\n")
            for path in ("logs", "events", "progress"):
                async with client.stream("GET", f"/v1/runs/{run}/{path}", params={"follow": 1}) as answer:
                    await anext(answer.aiter_lines())
                    assert made.api.streams.num_open == 1
                async with asyncio.timeout(5):
                    while made.api.streams.num_open:
                        await asyncio.sleep(0.01)

    asyncio.run(check())


def test_a_silent_stream_sends_empty_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        monkeypatch.setattr("racimo.control.exchange.KEEP_ALIVE_S", 0.02)
        async with stage(tmp_path) as made, served(made) as (_, client):
            run = (await made.submit("sleep"))["id"]
            worker = await made.until_started(run)
            async with client.stream("GET", f"/v1/runs/{run}/logs", params={"follow": 1}) as answer:
                source = answer.aiter_lines()
                assert [await anext(source) for _ in range(3)] == ["", "", ""]
                made.agent.print(worker, b"at last\n")
                made.agent.exited(worker)
                rest = [line async for line in source if line]
            assert len(rest) == 1 and "at last" in rest[0]

    asyncio.run(check())


def test_a_burst_of_output_arrives_whole_and_in_order(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made, served(made) as (_, client):
            made.agent.script["many",] = b"".join(b"%d\n" % number for number in range(100_000))
            run = (await made.submit("many"))["id"]
            async with client.stream("GET", f"/v1/runs/{run}/logs", params={"follow": 1}) as answer:
                lines = [msgspec.json.decode(line, type=LogLine) async for line in answer.aiter_lines() if line]
            assert [line.text for line in lines] == [str(number) for number in range(100_000)]

    asyncio.run(check())


def test_the_port_is_kept_if_it_is_free_and_another_taken_if_not() -> None:
    first = listen(0)
    port = first.getsockname()[1]
    first.listen()
    second = listen(port)
    assert second.getsockname()[1] != port
    second.close()
    client = socket.create_connection(("127.0.0.1", port))
    peer, _ = first.accept() if select_ready(first) else (None, None)
    assert peer is not None
    peer.close()  # leaves the connection in TIME_WAIT, as a killed process does
    client.close()
    first.close()
    third = listen(port)
    assert third.getsockname()[1] == port
    third.close()


def select_ready(listener: socket.socket) -> bool:
    import select

    return bool(select.select([listener], [], [], 5)[0])


def test_the_service_log_begins_anew_when_it_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[int, int]] = []
    path = tmp_path / "control.log"
    path.write_text("x" * 100)
    monkeypatch.setattr(service_log.os, "fstat", lambda fd: path.stat())
    monkeypatch.setattr(service_log.os, "dup2", lambda old, new: moved.append((old, new)))
    service_log.rotate_own_output(path, most_bytes=200)
    assert moved == []
    service_log.rotate_own_output(path, most_bytes=50)
    assert [new for _, new in moved] == [1, 2]
    assert path.stat().st_size == 0 and (tmp_path / "control.log.1").stat().st_size == 100
