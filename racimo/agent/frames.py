"""Frames on Unix sockets: a 4-byte big-endian length, then msgpack. Used by agent, zygotes and the control side."""

import asyncio
import socket
from typing import Any

import msgspec

from racimo.agent.protocol import FRAME_HEADER, MAX_FRAME_BYTES

_ENCODER = msgspec.msgpack.Encoder()


class FrameError(Exception):
    """The other side does not speak this protocol: a length beyond the bound, or bytes that do not decode."""


def encode_frame(message: Any) -> bytes:
    """One message with its length in front. `FrameError` if it is longer than a frame may be."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes is longer than the {MAX_FRAME_BYTES} that may be sent")
    return FRAME_HEADER.pack(len(body)) + body


def _checked_length(header: bytes, most_bytes: int = MAX_FRAME_BYTES) -> int:
    (length,) = FRAME_HEADER.unpack(header)
    if length > most_bytes:
        raise FrameError(f"a frame of {length} bytes is longer than the {most_bytes} that may be sent")
    return int(length)


async def read_frame(reader: asyncio.StreamReader, most_bytes: int = MAX_FRAME_BYTES) -> bytes | None:
    """The body of the next frame; None once the other side has closed (also in the middle of one). `FrameError` for one
    of more than `most_bytes`."""
    try:
        header = await reader.readexactly(FRAME_HEADER.size)
        return await reader.readexactly(_checked_length(header, most_bytes))
    except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
        return None


async def read_length(reader: asyncio.StreamReader, most_bytes: int) -> int | None:
    """How long the next frame's body is, which comes next; None once the other side has closed. `FrameError`."""
    try:
        return _checked_length(await reader.readexactly(FRAME_HEADER.size), most_bytes)
    except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
        return None


class FrameBuffer:
    """Puts frames together from the pieces that a non-blocking socket delivers."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """Adds `piece`; returns the bodies of all frames that are complete now."""
        self._pending += piece
        bodies = []
        while len(self._pending) >= FRAME_HEADER.size:
            length = _checked_length(bytes(self._pending[: FRAME_HEADER.size]))
            end = FRAME_HEADER.size + length
            if len(self._pending) < end:
                break
            bodies.append(bytes(self._pending[FRAME_HEADER.size : end]))
            del self._pending[:end]
        return bodies


def peer_uid(sock: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket, from the kernel (SO_PEERCRED)."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], "little")
