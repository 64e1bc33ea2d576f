"""One TCP connection between workers of different machines.

Both sides first prove that they know the key of their attempt; nothing of what the other says is decoded before. Then
frames go both ways: a packet (`messages.py`), and behind it a payload that is sent from, and received into, the memory
where it lies. Content is neither encrypted nor signed: the network between nodes has to be trusted (docs/training.md).
"""

import errno
import hashlib
import hmac
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import msgspec

from racimo.worker.children import close_in_children, drop
from racimo.worker.train.messages import MAX_PACKET_BYTES, Packet, Piece, StateOffer, decode, encode

MAGIC = b"racimo-mesh/1\n"
PIECE_BYTES = 256 * 1024
"""Of a state that streams beside the training; what is urgent goes between two pieces."""
SILENT_S = 10
"""A connection on which nothing is acknowledged for so long is broken."""
UNSENT_BYTES = 2**20
"""Handed to the kernel ahead of time."""
READ_BUDGET_BYTES = 4 * 2**20
"""From one connection before the others get their turn."""
MAX_STATE_BYTES = 2**40
_NONCE_BYTES = 32
_MAC_BYTES = 32
_MOST_VIEWS = 64
_FRAME = struct.Struct(">IQ")
_SILENCE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)

Landing = tuple[Sequence[memoryview], Any]
"""Where a payload goes, and what is handed on with its packet."""
Plan = Callable[[Packet, int], Landing]


class Broken(Exception):
    """The other side is not who it should be, or does not speak like one."""


def expect_no_payload(packet: Packet, size_bytes: int) -> Landing:
    if size_bytes:
        raise Broken(f"a payload of {size_bytes} bytes behind {type(packet).__name__}")
    return (), None


class Channel:
    """Everything but `post` and `offer_state` happens in the courier's thread. `inbox`: packets for the main thread."""

    def __init__(self, connection: socket.socket, key: bytes, dialed: bool) -> None:
        self.socket = connection
        self.inbox: deque[tuple[Packet, Any]] = deque()
        self.plan: Plan = expect_no_payload
        self.authentic = False
        self.gone = False
        self.why_gone = ""
        self.silent = False
        """It ended because nothing came back, not because somebody closed it."""
        self.slow_from_s = 0.0
        """When the next piece of a state may go."""
        self._key = key
        self._dialed = dialed
        self._urgent: deque[list[memoryview]] = deque()
        self._state: deque[list[memoryview]] = deque()
        self._slow: deque[list[memoryview]] = deque()
        self._sending: list[memoryview] = []
        self._sending_slow = False
        self._wanted: deque[memoryview] = deque()
        self._then: Callable[[], None] = lambda: None
        self._offered: tuple[StateOffer, int, mmap.mmap] | None = None
        self._missing_bytes = 0
        close_in_children(connection)
        connection.setblocking(False)
        _tune(connection)
        self._nonce = os.urandom(_NONCE_BYTES)
        if dialed:
            self._sending = [memoryview(MAGIC + self._nonce)]
            self._expect(_NONCE_BYTES + _MAC_BYTES, self._check_acceptor)
        else:
            self._expect(len(MAGIC) + _NONCE_BYTES, self._answer_dialer)

    # Who is there

    def _proof(self, role: bytes, first: bytes, second: bytes) -> bytes:
        return hmac.digest(self._key, role + first + second, hashlib.sha256)

    def _answer_dialer(self, said: bytes) -> None:
        if not said.startswith(MAGIC):
            raise Broken("it speaks another protocol")
        self._theirs = said[len(MAGIC) :]
        self._sending.append(memoryview(self._nonce + self._proof(b"accept", self._theirs, self._nonce)))
        self._expect(_MAC_BYTES, self._check_dialer)

    def _check_acceptor(self, said: bytes) -> None:
        theirs, proof = said[:_NONCE_BYTES], said[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, self._proof(b"accept", self._nonce, theirs)):
            raise Broken("it does not know the key of this attempt")
        self._sending.append(memoryview(self._proof(b"dial", theirs, self._nonce)))
        self.authentic = True
        self._expect_frame()

    def _check_dialer(self, said: bytes) -> None:
        if not hmac.compare_digest(said, self._proof(b"dial", self._nonce, self._theirs)):
            raise Broken("it does not know the key of this attempt")
        self.authentic = True
        self._expect_frame()

    # Coming in

    def _expect(self, size_bytes: int, then: Callable[[bytes], None]) -> None:
        content = bytearray(size_bytes)
        self._wanted.append(memoryview(content))
        self._then = lambda: then(bytes(content))

    def _expect_frame(self) -> None:
        self._expect(_FRAME.size, self._take_head)

    def _take_head(self, head: bytes) -> None:
        packet_bytes, payload_bytes = _FRAME.unpack(head)
        if not 0 < packet_bytes <= MAX_PACKET_BYTES:
            raise Broken(f"a packet of {packet_bytes} bytes")
        self._expect(packet_bytes, lambda content: self._take_packet(content, payload_bytes))

    def _take_packet(self, content: bytes, payload_bytes: int) -> None:
        try:
            packet = decode(content)
        except msgspec.DecodeError as error:
            raise Broken("a packet that cannot be decoded") from error
        views, extra = self._land(packet, payload_bytes)
        self._wanted.extend(view for view in views if len(view))
        self._then = lambda: self._deliver(packet, extra, payload_bytes)

    def _land(self, packet: Packet, payload_bytes: int) -> Landing:
        if isinstance(packet, StateOffer):
            if not 0 < packet.size_bytes <= MAX_STATE_BYTES or self._offered is not None:
                raise Broken(f"an offer of {packet.size_bytes} bytes of state")
            fd = os.memfd_create("racimo-state", os.MFD_CLOEXEC)
            os.ftruncate(fd, packet.size_bytes)
            self._offered = packet, fd, mmap.mmap(fd, packet.size_bytes)
            self._missing_bytes = packet.size_bytes
            return expect_no_payload(packet, payload_bytes)
        if isinstance(packet, Piece):
            if self._offered is None or not 0 <= packet.offset <= packet.offset + payload_bytes <= len(
                self._offered[2]
            ):
                raise Broken("a piece of a state that was not offered")
            return [memoryview(self._offered[2])[packet.offset : packet.offset + payload_bytes]], None
        views, extra = self.plan(packet, payload_bytes)
        if sum(map(len, views)) != payload_bytes:
            raise Broken(f"{payload_bytes} bytes behind {type(packet).__name__}, not {sum(map(len, views))}")
        return views, extra

    def _deliver(self, packet: Packet, extra: Any, payload_bytes: int) -> None:
        self._expect_frame()
        if isinstance(packet, Piece):
            self._missing_bytes -= payload_bytes
            if self._missing_bytes <= 0 and self._offered is not None:
                offer, fd, _ = self._offered
                self._offered = None
                self.inbox.append((offer, fd))
        elif not isinstance(packet, StateOffer):
            self.inbox.append((packet, extra))

    def read(self) -> None:
        """Takes in what is there. Raises `OSError` or `Broken` at the end of the connection."""
        budget = READ_BUDGET_BYTES
        while budget > 0:
            try:
                count = self.socket.recvmsg_into(list(islice(self._wanted, _MOST_VIEWS)))[0]
            except BlockingIOError:
                return
            if count == 0:
                raise ConnectionResetError("it closed the connection")
            budget -= count
            _advance(self._wanted, count)
            while not self._wanted:
                self._then()

    # Going out

    def post(self, packet: Packet, payload: Sequence[memoryview] = (), slow: bool = False) -> None:
        """From the main thread: the payload must lie still until the receiver has it, or the connection is closed.

        `slow`: behind whatever is urgent, on any connection."""
        (self._slow if slow else self._urgent).append(self._frame(packet, payload))

    def offer_state(self, offer: StateOffer, fd: int) -> None:
        """From the main thread: streams a state in pieces, behind whatever is urgent and before what else is slow."""
        content = memoryview(mmap.mmap(fd, offer.size_bytes, prot=mmap.PROT_READ))
        self._state.append(self._frame(offer, ()))
        for offset in range(0, offer.size_bytes, PIECE_BYTES):
            self._state.append(self._frame(Piece(offset=offset), [content[offset : offset + PIECE_BYTES]]))

    def _frame(self, packet: Packet, payload: Sequence[memoryview]) -> list[memoryview]:
        content = encode(packet)
        assert len(content) <= MAX_PACKET_BYTES, f"{type(packet).__name__} of {len(content)} bytes"
        head = _FRAME.pack(len(content), sum(map(len, payload)))
        return [memoryview(head + content), *(view for view in payload if len(view))]

    @property
    def slow_bytes(self) -> int:
        """Posted as slow, of which nothing was sent yet."""
        return sum(sum(map(len, frame)) for frame in list(self._slow))

    @property
    def has_urgent(self) -> bool:
        return bool(self._urgent) or (bool(self._sending) and not self._sending_slow)

    @property
    def has_slow(self) -> bool:
        return self.authentic and (
            bool(self._state) or bool(self._slow) or (bool(self._sending) and self._sending_slow)
        )

    def wants_to_write(self, now_s: float) -> bool:
        if self._sending and not self._sending_slow:
            return True
        return self.authentic and (bool(self._urgent) or (self.has_slow and now_s >= self.slow_from_s))

    def write(self, now_s: float, slow_bytes_per_s: float) -> None:
        """Sends until the kernel takes no more, of what is not urgent a piece."""
        while True:
            if not self._sending and not self._next_frame(now_s):
                return
            # A frame that was begun has to end before what is urgent behind it.
            slow = self._sending_slow and not self._urgent
            if slow and now_s < self.slow_from_s:
                return
            try:
                count = self.socket.sendmsg(
                    _first_bytes(self._sending, PIECE_BYTES) if slow else self._sending[:_MOST_VIEWS]
                )
            except BlockingIOError:
                return
            waiting = deque(self._sending)
            _advance(waiting, count)
            self._sending = list(waiting)
            if slow:
                self.slow_from_s = now_s + count / slow_bytes_per_s

    def _next_frame(self, now_s: float) -> bool:
        if not self.authentic:
            return False
        self._sending_slow = not self._urgent
        if self._urgent:
            self._sending = self._urgent.popleft()
        elif (self._state or self._slow) and now_s >= self.slow_from_s:
            self._sending = (self._state or self._slow).popleft()
        return bool(self._sending)

    # The end

    def fail(self, error: Exception) -> None:
        self.why_gone = str(error) or type(error).__name__
        self.silent = isinstance(error, OSError) and error.errno in _SILENCE
        self.gone = True

    def close(self) -> None:
        drop(self.socket)
        if self._offered is not None:
            os.close(self._offered[1])
            self._offered = None
        self._wanted.clear()
        self._urgent.clear()
        self._state.clear()
        self._slow.clear()
        self._sending = []


def _first_bytes(views: Sequence[memoryview], most_bytes: int) -> list[memoryview]:
    found = []
    for view in views:
        found.append(view[:most_bytes])
        most_bytes -= len(found[-1])
        if most_bytes <= 0:
            break
    return found


def _advance(views: deque[memoryview], count: int) -> None:
    while count:
        first = views.popleft()
        if count < len(first):
            views.appendleft(first[count:])
            return
        count -= len(first)


def _tune(connection: socket.socket) -> None:
    tcp = socket.IPPROTO_TCP
    connection.setsockopt(tcp, socket.TCP_NODELAY, 1)
    connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
    connection.setsockopt(tcp, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, SILENT_S // 2)
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(tcp, socket.TCP_KEEPCNT, 3)
