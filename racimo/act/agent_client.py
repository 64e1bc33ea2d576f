"""The control process's end of a connection with an agent, whoever made it: requests in flight by id, no polling."""

import asyncio
import itertools
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from racimo.agent.answers import error_of
from racimo.agent.frames import FrameError, encode_frame, read_frame
from racimo.agent.protocol import (
    MAX_FRAME_BYTES,
    Beat,
    ControlHello,
    ControlWelcome,
    Refused,
    Reply,
    ReplyBody,
    Request,
    RequestBody,
)
from racimo.spec.errors import RacimoError

CONNECT_TIMEOUT_S = 10.0
MAX_IN_FLIGHT = 256
TCP_INFO_BYTES = 104
LAST_DATA_RECV_OFFSET = 52
"""Of `tcpi_last_data_recv` in the kernel's `struct tcp_info`; that part of it never changes."""
_LAST_DATA_RECV_MS = struct.Struct("=I")

_FIRST_ANSWER = msgspec.msgpack.Decoder(ControlWelcome | Refused)
_REPLY = msgspec.msgpack.Decoder(Reply)


class AgentClient:
    """One connection. `welcome` is how the agent introduced itself; `closed` is set when the connection has ended.
    `on_beat` is called with each of its signs of life; `heard_s` is when anything came last (`time.monotonic`)."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, welcome: ControlWelcome) -> None:
        self.welcome = welcome
        self.closed = asyncio.Event()
        self.on_beat: Callable[[Beat], None] = lambda beat: None
        self.heard_s = time.monotonic()
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[ReplyBody]] = {}
        self._free = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._receiver = asyncio.create_task(self._receive(), name="agent-client")

    @staticmethod
    async def connect(path: Path, hello: ControlHello) -> "AgentClient":
        """Connects and introduces the control process.

        `RacimoError`: `unreachable` if nobody answers within 10 s, or what the agent refused with.
        """
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(path, limit=MAX_FRAME_BYTES)
                writer.write(encode_frame(hello))
                body = await read_frame(reader)
        except (OSError, TimeoutError, FrameError) as error:
            raise RacimoError("unreachable", f"no agent answers at {path}: {error or 'it is silent'}") from error
        if body is None:
            writer.close()
            raise RacimoError("unreachable", f"the agent at {path} closed the connection at once")
        answer = _FIRST_ANSWER.decode(body)
        if isinstance(answer, Refused):
            writer.close()
            raise error_of(answer)
        return AgentClient(reader, writer, answer)

    async def request(self, body: RequestBody) -> ReplyBody:
        """Sends one request and waits for its reply (as long as the agent lives: bound it with `asyncio.timeout`).

        `RacimoError`: the agent's refusal, or `unreachable` if the connection ends first.
        """
        async with self._free:
            if self.closed.is_set():
                raise RacimoError("unreachable", "the connection to the agent has ended")
            number = next(self._ids)
            reply: asyncio.Future[ReplyBody] = asyncio.get_running_loop().create_future()
            self._waiting[number] = reply
            try:
                self._writer.write(encode_frame(Request(number, body)))
                await self._writer.drain()
                answer = await reply
            except (OSError, FrameError) as error:
                raise RacimoError("unreachable", f"the agent could not be asked: {error}") from error
            finally:
                self._waiting.pop(number, None)
        if isinstance(answer, Refused):
            raise error_of(answer)
        return answer

    def last_byte_ago_s(self) -> float:
        """Seconds since anything came on this TCP connection, by the kernel's account; 0 once it has ended."""
        link = self._writer.get_extra_info("socket")
        try:
            info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        except (AttributeError, OSError):
            return 0.0
        return float(_LAST_DATA_RECV_MS.unpack_from(info, LAST_DATA_RECV_OFFSET)[0]) / 1000

    async def close(self) -> None:
        """Ends the connection at once; requests in flight fail with `unreachable`."""
        self.abort()
        await self.closed.wait()
        await asyncio.gather(self._receiver, return_exceptions=True)

    def abort(self) -> None:
        """As `close`, without waiting for it: what was not sent is dropped, the other side may be gone."""
        self._writer.transport.abort()

    async def _receive(self) -> None:
        why = "the connection to the agent has ended"
        try:
            while (body := await read_frame(self._reader)) is not None:
                reply = _REPLY.decode(body)
                self.heard_s = time.monotonic()
                if isinstance(reply.body, Beat):
                    self.on_beat(reply.body)
                    continue
                waiting = self._waiting.pop(reply.id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply.body)
        except (FrameError, msgspec.DecodeError) as error:
            why = f"the agent does not speak our protocol: {error}"
        except OSError as error:
            why = f"the connection to the agent broke: {error}"
        finally:
            self.closed.set()
            self._writer.transport.abort()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(RacimoError("unreachable", why))
