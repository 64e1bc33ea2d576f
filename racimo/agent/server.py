"""The agent's Unix socket: who connects, in which role, and the carrying of frames to and fro."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

import msgspec

from racimo.agent.answers import Answer, answer_requests
from racimo.agent.frames import FrameError, encode_frame, peer_uid, read_frame
from racimo.agent.protocol import (
    MAX_FRAME_BYTES,
    ControlHello,
    ControlWelcome,
    Opening,
    Refused,
    WorkerHello,
    WorkerMessage,
)
from racimo.version import PROTOCOL_VERSION, __version__

HELLO_TIMEOUT_S = 10.0

_OPENING = msgspec.msgpack.Decoder(Opening)
_WORKER_MESSAGE = msgspec.msgpack.Decoder(WorkerMessage)


class Server:
    """Serves control (one connection at a time, the newest) and workers (one each)."""

    def __init__(
        self,
        *,
        welcome: Callable[[], ControlWelcome],
        answer: Answer,
        beat: Callable[[asyncio.StreamWriter], Coroutine[None, None, None]],
        worker_connected: Callable[[WorkerHello, asyncio.StreamWriter], bool],
        worker_said: Callable[[str, WorkerMessage], None],
        worker_left: Callable[[str, asyncio.StreamWriter], None],
    ) -> None:
        self._welcome, self._answer, self._beat = welcome, answer, beat
        self._worker_connected, self._worker_said, self._worker_left = worker_connected, worker_said, worker_left
        self._control: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None

    async def listen(self, path: Path) -> None:
        """Takes the socket over from an earlier agent (which is dead: the caller holds the lock)."""
        # Under its name only once it listens: who sees the file can connect.
        draft = path.with_suffix(".new")
        draft.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(os.fspath(draft))
        draft.chmod(0o600)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=MAX_FRAME_BYTES)
        draft.replace(path)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        if self._control is not None:
            self._control.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if peer_uid(writer.get_extra_info("socket")) not in (os.getuid(), 0):
                return
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                body = await read_frame(reader)
            if body is None:
                return
            hello = _OPENING.decode(body)
            if isinstance(hello, ControlHello):
                await self._serve_control(hello, reader, writer)
            else:
                await self._serve_worker(hello, reader, writer)
        except (FrameError, msgspec.DecodeError, OSError) as error:  # TimeoutError is one
            print(f"agent: dropped a connection: {error!r}", file=sys.stderr)
        finally:
            writer.close()

    async def _serve_control(
        self, hello: ControlHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            message = f"the agent speaks protocol {PROTOCOL_VERSION} (racimo {__version__}), not {hello.protocol}"
            writer.write(
                encode_frame(Refused(code="version-mismatch", message=message, hint="racimo down && racimo up"))
            )
            await writer.drain()
            return
        if self._control is not None:
            self._control.close()
        self._control = writer
        writer.write(encode_frame(self._welcome()))
        beats = asyncio.create_task(self._beat(writer), name="beats")
        try:
            await answer_requests(reader, writer, self._answer)
        finally:
            beats.cancel()
            if self._control is writer:
                self._control = None

    async def _serve_worker(
        self, hello: WorkerHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if not self._worker_connected(hello, writer):
            return
        try:
            while (body := await read_frame(reader)) is not None:
                self._worker_said(hello.worker, _WORKER_MESSAGE.decode(body))
        finally:
            self._worker_left(hello.worker, writer)
