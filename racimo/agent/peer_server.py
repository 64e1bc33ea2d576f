"""Serves other agents: contents that are here or on their way, echoes and a sink for their measurements."""

import asyncio
import contextlib
import errno
import hmac
import secrets
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from racimo.act.tls_listener import TlsListener
from racimo.agent import state_transfer
from racimo.agent.arrivals import Arrivals
from racimo.agent.frames import FrameError, encode_frame
from racimo.agent.peer_protocol import (
    BUFFER_BYTES,
    MAX_ASK_BYTES,
    MAX_HELLO_BYTES,
    MAX_PIECE_BYTES,
    MAX_SINK_BYTES,
    NONCE_BYTES,
    PEER_PROTOCOL,
    Ask,
    ContentBegins,
    ContentMissing,
    Echo,
    GetContents,
    GetState,
    PeerChallenge,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    Piece,
    Sink,
    Sunk,
    notice_death,
    proof,
    read_message,
)
from racimo.agent.whole_file import write_whole
from racimo.spec.errors import RacimoError

FIRST_PORT, LAST_PORT = 7701, 7799
MAX_PEERS = 64
MAX_CONNECTIONS = 256
"""Those that have not shown yet who they are included; `TlsListener` bounds those before."""
MAX_UNMET_OF_ADDRESS = 64
"""Of those that have not shown it, so that one stranger alone does not keep the nodes out."""
HELLO_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 60.0
BACKLOG = 128
PORT_FILE = "peer_port"

_HELLO = msgspec.msgpack.Decoder(PeerHello)
_ASK = msgspec.msgpack.Decoder(Ask)
_PIECE = msgspec.msgpack.Decoder(Piece)


class PeerServer:
    """Listens at one address of this node. `folder` keeps the port, so that it stays the same across restarts.
    `output_dir` says where a run's outputs lie here, the states of its trials among them."""

    def __init__(
        self,
        folder: Path,
        context: ssl.SSLContext,
        pin: str,
        key: bytes,
        arrivals: Arrivals,
        output_dir: Callable[[str], Path] = Path,
    ) -> None:
        self.port = 0
        self._folder, self._context, self._pin, self._key = folder, context, pin, key
        self._arrivals, self._output_dir = arrivals, output_dir
        self._listening: asyncio.Task[None] | None = None
        self._unmet: Counter[str] = Counter()
        self._connections: set[asyncio.Task[None]] = set()
        self._num_met = 0

    async def listen(self, address: str) -> int:
        """The port that it listens on. `OSError`: the address is not this machine's, or no port is free."""
        listener = self._bind(address)
        door = TlsListener(listener, self._context, self._new_connection, HELLO_TIMEOUT_S)
        self._listening = asyncio.get_running_loop().create_task(door.run(), name="peers")
        self.port = listener.getsockname()[1]
        write_whole(self._folder / PORT_FILE, str(self.port).encode())
        return self.port

    async def close(self) -> None:
        tasks = [*self._connections] if self._listening is None else [self._listening, *self._connections]
        self._listening = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _bind(self, address: str) -> socket.socket:
        ports = list(range(FIRST_PORT, LAST_PORT + 1))
        with contextlib.suppress(FileNotFoundError, ValueError):
            ports.insert(0, int((self._folder / PORT_FILE).read_text()))
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        for port in ports:
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
                listener.listen(BACKLOG)  # two listeners may bind one port with SO_REUSEADDR; one may listen
            except OSError as error:
                listener.close()
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                continue
            listener.setblocking(False)
            return listener
        raise OSError(errno.EADDRINUSE, f"no port from {FIRST_PORT} to {LAST_PORT} is free at {address}")

    def _new_connection(self) -> asyncio.StreamReaderProtocol:
        loop = asyncio.get_running_loop()
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(BUFFER_BYTES, loop), self._accepted, loop)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = str(writer.get_extra_info("peername")[0])
        if len(self._connections) >= MAX_CONNECTIONS or self._unmet[address] >= MAX_UNMET_OF_ADDRESS:
            writer.transport.abort()
            return
        self._unmet[address] += 1
        task = asyncio.get_running_loop().create_task(self._serve(address, reader, writer), name="peer")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                notice_death(writer.get_extra_info("socket"))
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    welcome = await self._meet(reader, writer)
            finally:
                self._unmet -= Counter({address: 1})
            if welcome:
                self._num_met += 1
                try:
                    await self._answer_all(reader, writer)
                finally:
                    self._num_met -= 1
        except (FrameError, OSError) as error:  # TimeoutError is one
            print(f"agent: dropped a peer's connection: {error!r}", file=sys.stderr)
        finally:
            writer.close()

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                ask = await read_message(reader, _ASK, MAX_ASK_BYTES)
            if ask is None:
                return
            await self._answer(ask, reader, writer)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.write(encode_frame(PeerChallenge(protocol=PEER_PROTOCOL, nonce=nonce)))
        hello = await read_message(reader, _HELLO, MAX_HELLO_BYTES)
        if hello is None:
            return False
        refused: PeerRefused | None = None
        if not hmac.compare_digest(hello.proof, proof(self._key, "client", nonce, hello.nonce, self._pin)):
            refused = PeerRefused(code="unauthorized", message="it knows another cluster's token")
        elif hello.protocol != PEER_PROTOCOL:
            refused = PeerRefused(
                code="version-mismatch", message=f"agents speak protocol {PEER_PROTOCOL} here, not {hello.protocol}"
            )
        elif self._num_met >= MAX_PEERS:
            refused = PeerRefused(code="busy", message=f"{MAX_PEERS} other agents are being served")
        own = PeerWelcome(proof=proof(self._key, "server", nonce, hello.nonce, self._pin))
        writer.write(encode_frame(refused or own))
        await writer.drain()
        return refused is None

    async def _answer(self, ask: Ask, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        match ask:
            case Echo():
                writer.write(encode_frame(ask))
                await writer.drain()
            case Sink():
                await self._sink(reader, writer)
            case GetState():
                await state_transfer.send(ask, self._output_dir, writer)
            case GetContents():
                wait = True
                for sha256 in ask.sha256s:
                    # Where one does not come the others need not be waited for one by one.
                    wait = await self._send_content(sha256, writer, wait=wait) and wait
                await writer.drain()

    async def _sink(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        began_s = time.monotonic()
        size_bytes = 0
        while size_bytes < MAX_SINK_BYTES:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                piece = await read_message(reader, _PIECE, MAX_PIECE_BYTES)
            if piece is None or not piece.content:
                break
            size_bytes += len(piece.content)
        writer.write(encode_frame(Sunk(size_bytes=size_bytes, passed_s=time.monotonic() - began_s)))
        await writer.drain()

    async def _send_content(self, sha256: str, writer: asyncio.StreamWriter, *, wait: bool) -> bool:
        """Whether it was there."""
        try:
            size_bytes, pieces = await self._arrivals.read(sha256, wait=wait)
            writer.write(encode_frame(ContentBegins(sha256=sha256, size_bytes=size_bytes)))
            async with contextlib.aclosing(pieces) as source:
                async for piece in source:
                    writer.write(encode_frame(Piece(content=piece)))
                    await writer.drain()
        except RacimoError as error:
            writer.write(encode_frame(ContentMissing(sha256=sha256, message=error.message)))
            return False
        return True
