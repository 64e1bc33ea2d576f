"""Peers, and the connections between those of one machine: Unix sockets that carry packets and file descriptors.

Those are processes of the same user: the listening socket lies in a private folder and the kernel says who connects
(SO_PEERCRED). One packet of a `SOCK_SEQPACKET` socket is one message.
"""

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from racimo.spec.errors import RacimoError
from racimo.state.nouns import parse_worker_id
from racimo.worker.children import close_in_children, drop
from racimo.worker.train.buffers import Arena, Layout
from racimo.worker.train.messages import MAX_PACKET_BYTES, Hello, Packet, decode
from racimo.worker.train.stream import Channel

_BACKLOG = 256
_MAX_FDS = 1
_CREDENTIALS = struct.Struct("3i")


class Peer:
    """Another member. `inbox` holds what it said and nobody has taken yet, with what came along (a descriptor, memory).

    On this machine it has a `connection`, and its arena is its own memory; on another a `channel`, and its arena is a
    place here where the parts of its blocks are received."""

    def __init__(
        self, rank: int, worker: str, arena: Arena, connection: socket.socket | None, channel: Channel | None = None
    ) -> None:
        self.rank = rank
        self.worker = worker
        self.arena = arena
        self.connection = connection
        self.channel = channel
        self.inbox: list[tuple[Packet, Any]] = []
        self.gone = False
        self.done = False

    @property
    def remote(self) -> bool:
        return self.channel is not None

    def close(self) -> None:
        """What belongs to a channel is the courier's to close."""
        if self.connection is not None:
            drop(self.connection)
        self.arena.close()
        for _, extra in self.inbox:
            if isinstance(extra, int):
                os.close(extra)

    @property
    def index(self) -> int:
        return parse_worker_id(self.worker)[2]


class Listener:
    """Accepts peers. One may know of a generation before this worker does; it waits here until then."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        self._layout = layout
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        close_in_children(self.socket)
        self.socket.bind(str(path))
        path.chmod(0o600)
        self.socket.listen(_BACKLOG)
        self.socket.setblocking(False)
        self._unknown: list[socket.socket] = []
        self._parked: dict[tuple[int, str], tuple[socket.socket, Arena]] = {}

    @property
    def sockets(self) -> list[socket.socket]:
        return [self.socket, *self._unknown]

    def receive(self, ready: socket.socket, accept: Callable[[Hello], bool]) -> None:
        """Takes a new connection, or the first packet of one."""
        if ready is self.socket:
            connection, _ = self.socket.accept()
            close_in_children(connection)
            connection.setblocking(False)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
                drop(connection)
                return
            self._unknown.append(connection)
            return
        self._unknown.remove(ready)
        packet, fd = receive(ready)
        if not isinstance(packet, Hello) or fd is None or not accept(packet):
            drop(ready)
            if fd is not None:
                os.close(fd)
            return
        if packet.slot_bytes != self._layout.slot_bytes:
            os.close(fd)
            drop(ready)
            raise other_model(packet.worker, packet.slot_bytes, self._layout.slot_bytes)
        self._forget(packet.generation, packet.worker)
        self._parked[packet.generation, packet.worker] = ready, Arena(self._layout, fd)

    def take(self, generation: int, worker: str) -> tuple[socket.socket, Arena] | None:
        return self._parked.pop((generation, worker), None)

    def forget_before(self, generation: int) -> None:
        for key in [key for key in self._parked if key[0] < generation]:
            self._forget(*key)

    def _forget(self, generation: int, worker: str) -> None:
        if parked := self._parked.pop((generation, worker), None):
            connection, arena = parked
            drop(connection)
            arena.close()

    def close(self) -> None:
        self.forget_before(2**62)
        for connection in self.sockets:
            drop(connection)
        self.path.unlink(missing_ok=True)


def receive(connection: socket.socket) -> tuple[Packet | None, int | None]:
    """One packet and the descriptor that came with it; (None, None) at the end of the stream."""
    while True:
        try:
            payload, fds, _, _ = socket.recv_fds(connection, MAX_PACKET_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            # Reported once when the peer ended with packets unread; what it had sent comes after it.
            continue
        break
    fd = fds[0] if fds else None
    if not payload:
        return None, None
    try:
        return decode(payload), fd
    except msgspec.DecodeError:
        return None, None


def other_model(worker: str, theirs: int, ours: int) -> RacimoError:
    return RacimoError(
        "steps-misused",
        f"worker {worker} trains another model: its gradients take {theirs} bytes, ours {ours}",
        "build the same model on every worker",
    )
