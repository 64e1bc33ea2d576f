"""Asks other agents: for contents, and how far away they are."""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import ssl
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from racimo.agent.arrivals import PIECE_BYTES, Arrival, Arrivals
from racimo.agent.frames import FrameError, encode_frame
from racimo.agent.peer_protocol import (
    BUFFER_BYTES,
    MAX_ECHO_BYTES,
    MAX_HELLO_BYTES,
    MAX_PIECE_BYTES,
    NONCE_BYTES,
    PEER_PROTOCOL,
    Answer,
    ContentBegins,
    ContentMissing,
    Echo,
    GetContents,
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
from racimo.agent.protocol import FetchReply, PeerAddress, ProbeReply
from racimo.spec.errors import ERROR_KINDS, RacimoError

CONNECT_TIMEOUT_S = 3.0
STALL_S = 12.0
"""A source that sends nothing for so long has nothing more (it waits 10 s itself for what is on its way to it)."""
ECHO_TIMEOUT_S = 3.0
SEND_PIECE_BYTES = 128 * 1024
SEND_MOST_S = 1.5
"""A slow link is measured with what went over it in this time."""
SINK_TIMEOUT_S = 10.0
MAX_ROUND_TRIPS = 1_000

_CHALLENGE = msgspec.msgpack.Decoder(PeerChallenge)
_WELCOME = msgspec.msgpack.Decoder(PeerWelcome | PeerRefused)
_ANSWER = msgspec.msgpack.Decoder(Answer)


def _context() -> ssl.SSLContext:
    """The certificate is self-signed: its pin is compared instead, before a word is said."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


class Peer:
    """One connection to another agent; one request at a time."""

    def __init__(self, address: PeerAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.address = address
        self._reader, self._writer = reader, writer

    async def say(self, message: Any) -> None:
        self._writer.write(encode_frame(message))
        await self._writer.drain()

    async def hear(self, timeout_s: float) -> Answer:
        async with asyncio.timeout(timeout_s):
            answer = await read_message(self._reader, _ANSWER, MAX_PIECE_BYTES)
        if answer is None:
            raise ConnectionResetError(f"the agent of {self.address.node} ended the connection")
        return answer

    async def fetch(self, sha256s: Sequence[str], arrivals: Arrivals) -> tuple[str, ...]:
        """Gets contents into this node's store; those that the peer does not have. `OSError`, `FrameError`: it broke
        off; whatever came whole until then is there."""
        await self.say(GetContents(sha256s=tuple(sha256s)))
        missing = []
        for position, sha256 in enumerate(sha256s):
            answer = await self.hear(STALL_S)
            if isinstance(answer, ContentMissing) and answer.sha256 == sha256:
                missing.append(sha256)
            elif not isinstance(answer, ContentBegins) or answer.sha256 != sha256:
                raise FrameError(f"asked for content {sha256[:12]}, {self.address.node} answers {str(answer)[:100]}")
            elif not await self._receive(answer, arrivals):
                # The source's own source is gone: whoever knows of another should hear of it now.
                return (*missing, *sha256s[position:])
        return tuple(missing)

    async def _receive(self, begins: ContentBegins, arrivals: Arrivals) -> bool:
        """False if the source says that no more will come."""
        if begins.size_bytes <= PIECE_BYTES:
            return await self._receive_small(begins, arrivals)
        arrival: Arrival = arrivals.begin(begins.sha256, begins.size_bytes)
        try:
            received = 0
            while received < begins.size_bytes:
                answer = await self.hear(STALL_S)
                if not isinstance(answer, Piece):
                    return False
                received += len(answer.content)
                await arrivals.add(begins.sha256, arrival, answer.content)
            return True
        finally:
            arrivals.abandon(begins.sha256, arrival)  # harmless when it is complete

    async def _receive_small(self, begins: ContentBegins, arrivals: Arrivals) -> bool:
        content = b""
        while len(content) < begins.size_bytes:
            answer = await self.hear(STALL_S)
            if not isinstance(answer, Piece):
                return False
            content += answer.content
        await arrivals.put(begins.sha256, content)
        return True

    async def round_trip_s(self, count: int) -> float:
        """Median of `count` round trips of a few bytes, seconds."""
        passed = []
        for number in range(count):
            content = number.to_bytes(4, "big")
            began_s = time.perf_counter()
            await self.say(Echo(content=content))
            answer = await self.hear(ECHO_TIMEOUT_S)
            passed.append(time.perf_counter() - began_s)
            if not isinstance(answer, Echo) or answer.content != content or len(answer.content) > MAX_ECHO_BYTES:
                raise FrameError(f"the agent of {self.address.node} answers an echo with something else")
        return statistics.median(passed)

    async def bandwidth_bytes_per_s(self, size_bytes: int) -> float:
        """Sends `size_bytes`, or what goes in `SEND_MOST_S`; bytes per second as the peer saw them come."""
        piece = encode_frame(Piece(content=bytes(SEND_PIECE_BYTES)))
        self._writer.write(encode_frame(Sink()))
        sent_bytes, end_s = 0, time.monotonic() + SEND_MOST_S
        async with asyncio.timeout(SINK_TIMEOUT_S):
            while sent_bytes < size_bytes and time.monotonic() < end_s:
                self._writer.write(piece)
                await self._writer.drain()
                sent_bytes += SEND_PIECE_BYTES
            await self.say(Piece())
        answer = await self.hear(SINK_TIMEOUT_S)
        if not isinstance(answer, Sunk):
            raise FrameError(f"the agent of {self.address.node} does not say what it received")
        return answer.size_bytes / max(answer.passed_s, 1e-6)


@contextlib.asynccontextmanager
async def connect(address: PeerAddress, key: bytes) -> AsyncIterator[Peer]:
    """A connection on which both sides have shown that they are of this cluster.

    `RacimoError` unreachable with address and reason, certificate-mismatch, or what the peer refuses with."""
    where = f"{address.address}:{address.port}"
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                address.address, address.port, ssl=_context(), limit=BUFFER_BYTES
            )
            notice_death(writer.get_extra_info("socket"))
            await _introduce(address, key, reader, writer)
    except (OSError, FrameError) as error:  # TimeoutError and ssl.SSLError are among them
        if writer is not None:
            writer.transport.abort()
        reason = "no answer" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        raise RacimoError(
            "unreachable",
            f"the agent of {address.node} at {where} cannot be reached: {reason}",
            f"let TCP port {address.port} of {address.address} through the firewalls in between",
        ) from error
    except BaseException:
        if writer is not None:
            writer.transport.abort()
        raise
    try:
        yield Peer(address, reader, writer)
    finally:
        writer.transport.abort()  # nobody waits for the rest


async def _introduce(
    address: PeerAddress, key: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    found = hashlib.sha256(shown or b"").hexdigest()
    if not hmac.compare_digest(found, address.pin):
        raise RacimoError(
            "certificate-mismatch",
            f"at {address.address}:{address.port} answers another than the agent of {address.node}: its certificate is"
            f" {found[:16]}…, not {address.pin[:16]}…",
            "look for another machine with the same address",
        )
    challenge = await read_message(reader, _CHALLENGE, MAX_HELLO_BYTES)
    if challenge is None:
        raise ConnectionResetError("it closed the connection at once")
    nonce = secrets.token_bytes(NONCE_BYTES)
    own = proof(key, "client", challenge.nonce, nonce, address.pin)
    writer.write(encode_frame(PeerHello(protocol=PEER_PROTOCOL, nonce=nonce, proof=own)))
    welcome = await read_message(reader, _WELCOME, MAX_HELLO_BYTES)
    if welcome is None:
        raise ConnectionResetError("it closed the connection in the middle of its greeting")
    if isinstance(welcome, PeerRefused):
        code = welcome.code if welcome.code in ERROR_KINDS else "internal"
        raise RacimoError(code, f"the agent of {address.node} refuses this one: {welcome.message}")
    expected = proof(key, "server", challenge.nonce, nonce, address.pin)
    if not hmac.compare_digest(welcome.proof, expected):
        raise RacimoError("unauthorized", f"the agent of {address.node} does not know this cluster's token")


async def fetch_contents(address: PeerAddress, key: bytes, sha256s: Sequence[str], arrivals: Arrivals) -> FetchReply:
    """All that can be had from there."""
    problem = ""
    try:
        async with connect(address, key) as peer:
            return FetchReply(missing=await peer.fetch(sha256s, arrivals))
    except RacimoError as error:
        problem = error.message
    except (OSError, FrameError) as error:
        problem = f"the agent of {address.node} broke off: {error or 'it is silent'}"
    return FetchReply(missing=tuple(one for one in sha256s if not arrivals.store.path(one).exists()), problem=problem)


async def probe(address: PeerAddress, key: bytes, round_trips: int, size_bytes: int) -> ProbeReply:
    """Latency and bandwidth to there, or why not."""
    try:
        async with connect(address, key) as peer:
            latency_s = await peer.round_trip_s(min(max(round_trips, 1), MAX_ROUND_TRIPS))
            rate = await peer.bandwidth_bytes_per_s(size_bytes) if size_bytes > 0 else 0.0
            return ProbeReply(latency_s=latency_s, bandwidth_bytes_per_s=rate)
    except RacimoError as error:
        return ProbeReply(problem=error.message)
    except (OSError, FrameError) as error:
        return ProbeReply(problem=f"the agent of {address.node} broke off: {error or 'it is silent'}")
