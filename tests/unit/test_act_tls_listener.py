"""Who may take room in a process before it has shown that it speaks TLS."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from racimo.act.tls import client_context, make_certificate, server_context
from racimo.act.tls_listener import TlsListener

WAIT_S = 10.0


class Door:
    def __init__(self, folder: Path, **bounds: int) -> None:
        self.pem, key = make_certificate(["h"])
        (folder / "cert").write_bytes(self.pem)
        (folder / "key").write_bytes(key)
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self.met = 0
        self.listener = TlsListener(
            listener, server_context(folder / "cert", folder / "key"), self._protocol, WAIT_S, **bounds
        )

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._meet)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.met += 1
        writer.write(b"hello")
        writer.close()

    async def silent(self, source: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(source, 0))

    async def honest(self, source: str = "127.0.0.1") -> bytes:
        reader, _ = await asyncio.open_connection(
            "127.0.0.1", self.port, local_addr=(source, 0), ssl=client_context(self.pem), server_hostname=""
        )
        return await reader.read()


@contextlib.asynccontextmanager
async def listening(folder: Path, **bounds: int) -> AsyncIterator[Door]:
    door = Door(folder, **bounds)
    running = asyncio.create_task(door.listener.run())
    async with asyncio.timeout(WAIT_S):
        yield door
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_one_address_that_says_nothing_keeps_nobody_else_out(tmp_path: Path) -> None:
    async def play() -> None:
        async with listening(tmp_path, most=8, most_of_address=2) as door:
            silent = [await door.silent("127.0.0.5") for _ in range(5)]
            turned_away = await asyncio.gather(*(reader.read() for reader, _ in silent[2:]))
            assert turned_away == [b"", b"", b""] and door.listener.num_turned_away == 3
            assert await door.honest("127.0.0.6") == b"hello"
            for _, writer in silent:
                writer.close()

    asyncio.run(play())


def test_there_is_a_bound_for_all_together_and_room_again_once_some_are_gone(tmp_path: Path) -> None:
    async def play() -> None:
        async with listening(tmp_path, most=2, most_of_address=2) as door:
            connections = [await door.silent(f"127.0.0.{number}") for number in (5, 6)]
            with pytest.raises((ssl.SSLError, OSError)):
                await door.honest("127.0.0.7")
            for _, writer in connections:
                writer.write(b"this is no TLS\r\n" * 10)
            for reader, writer in connections:
                with contextlib.suppress(ConnectionResetError):
                    await reader.read()
                writer.close()
            assert await door.honest("127.0.0.7") == b"hello"
            assert door.met == 1

    asyncio.run(play())


def test_its_end_ends_the_listening_and_the_handshakes(tmp_path: Path) -> None:
    async def play() -> None:
        async with listening(tmp_path) as door:
            reader, writer = await door.silent()
            assert await door.honest() == b"hello"
        assert await reader.read() == b""
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await door.silent()

    asyncio.run(play())
