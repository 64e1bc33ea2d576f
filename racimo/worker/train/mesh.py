"""The members of one generation as this worker reaches them: a connection to each, and a view of its arena.

Payloads never travel through a socket. Every wait also watches the agent's link, so a newer generation or a peer's end
interrupts it at once.
"""

import selectors
import socket
from collections.abc import Callable, Collection
from typing import TypeVar

from racimo.spec.errors import RacimoError
from racimo.state.nouns import parse_worker_id
from racimo.worker.children import close_in_children, drop
from racimo.worker.context import WorkerLeaving
from racimo.worker.link import Link
from racimo.worker.train.buffers import Arena, Layout
from racimo.worker.train.messages import MAX_PACKET_BYTES, Done, Hello, Left, Packet, encode
from racimo.worker.train.wire import Listener, Peer, other_model, receive

TOLD_AFTER_S = 0.1
"""A wait shorter than this is not worth a word about whom it is for."""
LEFT_GRACE_S = 2.0
"""How long a peer that left its loop may take to be seen as failed before its leaving is called the error."""

P = TypeVar("P", bound=Packet)


class Regroup(Exception):
    """The generation is over, or cannot go on: settle with the next one."""


class Mesh:
    """The connections of one generation. `settled` once its members agreed on where they stand."""

    def __init__(self, number: int, members: tuple[str, ...], me: str) -> None:
        self.number = number
        self.members = members
        self.rank = members.index(me)
        self.peers: dict[int, Peer] = {}
        self.round = 0
        self.settled = False

    @property
    def size(self) -> int:
        return len(self.members)


class Switchboard:
    """Builds a mesh per generation and carries packets; all of this worker's socket waits are in `wait`."""

    def __init__(self, me: str, arena: Arena, layout: Layout, link: Link, listener: Listener | None) -> None:
        self.me = me
        self.run, self.attempt, _ = parse_worker_id(me)
        self.mesh: Mesh | None = None
        self._arena = arena
        self._layout = layout
        self._link = link
        self._listener = listener
        self._number = 0
        self._joined = False
        self._leavers: dict[str, int] = {}

    # Generations

    @property
    def outdated(self) -> bool:
        """Whether a newer generation than the mesh's is known. Costs no system call."""
        newest = self._link.newest()
        return self.mesh is None or (newest is not None and newest.number > self.mesh.number)

    def next_mesh(self, waiting: Callable[[tuple[int, ...]], None]) -> Mesh:
        """Waits for the newest generation and connects with all its members; raises `WorkerLeaving` if I am none.

        `waiting` is called with the indices of peers that are still missing."""
        while True:
            self.abandon()
            self.wait(lambda: self._newest_number() > self._number, lambda: waiting(()))
            newest = self._link.newest()
            assert newest is not None
            self._number = newest.number
            members = tuple(member.worker for member in newest.members)
            if self.me not in members:
                if self._joined or newest.attempt > self.attempt:
                    raise WorkerLeaving("released")
                continue  # the others' present generation; one with me will come
            self._joined = True
            self.mesh = Mesh(newest.number, members, self.me)
            try:
                self._connect(self.mesh, [member.address for member in newest.members], waiting)
            except Regroup:
                continue
            return self.mesh

    def _newest_number(self) -> int:
        newest = self._link.newest()
        return newest.number if newest is not None else 0

    def _connect(self, mesh: Mesh, addresses: list[str], waiting: Callable[[tuple[int, ...]], None]) -> None:
        for rank in range(mesh.rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            close_in_children(connection)
            try:
                connection.connect(addresses[rank])
                self._greet(connection, mesh.number)
            except OSError as error:  # it died; the next generation is without it
                drop(connection)
                raise Regroup from error
            connection.setblocking(False)
            mesh.peers[rank] = Peer(rank, mesh.members[rank], connection, self._await_hello(connection, mesh, rank))
        assert self._listener is not None or mesh.size == 1
        if self._listener is None:
            return
        self._listener.forget_before(mesh.number)

        def missing() -> list[int]:
            assert self._listener is not None
            for rank in range(mesh.rank + 1, mesh.size):
                if rank not in mesh.peers and (taken := self._listener.take(mesh.number, mesh.members[rank])):
                    connection, arena = taken
                    mesh.peers[rank] = Peer(rank, mesh.members[rank], connection, arena)
                    self._greet_or_regroup(connection, mesh.number)
            return [rank for rank in range(mesh.size) if rank != mesh.rank and rank not in mesh.peers]

        self.wait(
            lambda: not missing(),
            lambda: waiting(tuple(parse_worker_id(mesh.members[rank])[2] for rank in missing())),
        )

    def _greet(self, connection: socket.socket, generation: int) -> None:
        hello = Hello(
            run=self.run,
            attempt=self.attempt,
            generation=generation,
            worker=self.me,
            slot_bytes=self._layout.slot_bytes,
        )
        socket.send_fds(connection, [encode(hello)], [self._arena.fd])

    def _greet_or_regroup(self, connection: socket.socket, generation: int) -> None:
        try:
            self._greet(connection, generation)
        except OSError as error:
            raise Regroup from error

    def _await_hello(self, connection: socket.socket, mesh: Mesh, rank: int) -> Arena:
        """The other side answers once it knows of this generation, and hangs up if it knows of a newer one."""
        got: list[tuple[Packet | None, int | None]] = []
        self._pump_until(lambda: bool(got), {connection: lambda: got.append(receive(connection))})
        packet, fd = got[0]
        if not isinstance(packet, Hello) or fd is None or packet.worker != mesh.members[rank]:
            drop(connection)
            raise Regroup
        if packet.slot_bytes != self._layout.slot_bytes:
            raise other_model(packet.worker, packet.slot_bytes, self._layout.slot_bytes)
        return Arena(self._layout, fd)

    def abandon(self) -> None:
        """Leaves the present generation. From here on my blocks may change, so peers must not trust what they read."""
        self._arena.serving = 0
        if self.mesh is None:
            return
        for peer in self.mesh.peers.values():
            while not peer.gone and self._drain(peer):
                pass
            peer.close()
        self.mesh = None

    # Packets

    def send(self, packet: Packet, ranks: list[int] | None = None, fd: int | None = None) -> None:
        """Sends to the given ranks, or to all peers. A peer that is gone is noticed where its answer is awaited."""
        assert self.mesh is not None
        payload = encode(packet)
        assert len(payload) <= MAX_PACKET_BYTES, f"{type(packet).__name__} of {len(payload)} bytes"
        for rank in self.mesh.peers if ranks is None else ranks:
            peer = self.mesh.peers[rank]
            self._push(peer, payload, fd)

    def say_left(self, step: int) -> None:
        """Tells peers that my loop was left, and keeps the connections, which end with the process."""
        if self.mesh is not None:
            self.send(Left(step=step))

    def _push(self, peer: Peer, payload: bytes, fd: int | None) -> None:
        while not peer.gone:
            try:
                socket.send_fds(peer.connection, [payload], [] if fd is None else [fd])
                return
            except BlockingIOError:
                self._pump_once({}, peer.connection, None)
            except OSError:
                # What it sent before it went is still to be read; the end of its stream marks it gone.
                return

    def take(self, peer: Peer, kind: type[P], wanted: Callable[[P], bool]) -> tuple[P, int | None] | None:
        """Removes and returns the first such packet from the peer's inbox."""
        for position, (packet, fd) in enumerate(peer.inbox):
            if isinstance(packet, kind) and wanted(packet):
                del peer.inbox[position]
                return packet, fd
        return None

    def collect(
        self, kind: type[P], wanted: Callable[[P], bool], waiting: Callable[[tuple[int, ...]], None], step: int
    ) -> dict[int, P]:
        """Waits until every peer has sent such a packet, which are returned by rank. `step`: commits made so far."""
        assert self.mesh is not None
        mesh = self.mesh
        found: dict[int, P] = {}

        def complete() -> bool:
            for rank, peer in mesh.peers.items():
                if rank not in found and (taken := self.take(peer, kind, wanted)):
                    found[rank] = taken[0]
            return len(found) == len(mesh.peers)

        def absent() -> list[Peer]:
            return [peer for rank, peer in mesh.peers.items() if rank not in found]

        def judge() -> None:
            self.refuse_leavers(step, {peer.worker for peer in absent()})
            if any(peer.gone for peer in absent()):
                raise Regroup

        self.wait(complete, lambda: waiting(tuple(peer.index for peer in absent())), judge)
        return found

    def receive_from(self, rank: int, kind: type[P], waiting: Callable[[tuple[int, ...]], None]) -> tuple[P, int]:
        """Waits for one packet that brings a descriptor, which the caller closes."""
        assert self.mesh is not None
        peer = self.mesh.peers[rank]
        found: list[tuple[P, int]] = []

        def arrived() -> bool:
            if taken := self.take(peer, kind, lambda packet: True):
                packet, fd = taken
                assert fd is not None
                found.append((packet, fd))
            return bool(found)

        def judge() -> None:
            if peer.gone:
                raise Regroup

        self.wait(arrived, lambda: waiting((peer.index,)), judge)
        return found[0]

    def refuse_leavers(self, step: int, among: Collection[str] | None = None) -> None:
        """Raises if some member (of those given) walked away from its loop while others go on with step `step` + 1."""
        for worker, left_after in self._leavers.items():
            if left_after <= step and (among is None or worker in among):
                self._wait_for_next(LEFT_GRACE_S)
                rank = self.mesh.members.index(worker) if self.mesh and worker in self.mesh.members else "?"
                raise RacimoError(
                    "worker-left-early",
                    f"rank {rank} ({worker}) left its loop over run.steps after step {left_after}, "
                    f"while others go on to step {step + 1}",
                    "leave the loop on all workers at the same step, or let it run to `until`",
                )

    def _wait_for_next(self, timeout_s: float) -> None:
        """Gives the cluster time to see how the peer ended: its own error comes first, and ends this worker too."""
        self._pump_until(lambda: self.outdated, {}, timeout_s=timeout_s)

    def wait(
        self,
        condition: Callable[[], bool],
        waiting: Callable[[], None] = lambda: None,
        judge: Callable[[], None] = lambda: None,
    ) -> None:
        """Returns once `condition` holds. Raises `Regroup` if a newer generation than the mesh's comes first.

        `judge` may raise after each event; `waiting` is told once the wait has become long."""
        told = False
        while not condition():
            if self.mesh is not None and self.outdated:
                raise Regroup
            judge()
            if not self._pump_once({}, None, None if told else TOLD_AFTER_S):
                waiting()
                told = True

    def _pump_until(
        self,
        condition: Callable[[], bool],
        extra: dict[socket.socket, Callable[[], object]],
        timeout_s: float | None = None,
    ) -> None:
        while not condition():
            if self.mesh is not None and self.outdated:
                raise Regroup
            if not self._pump_once(extra, None, timeout_s) and timeout_s is not None:
                return

    def _pump_once(
        self, extra: dict[socket.socket, Callable[[], object]], writable: socket.socket | None, timeout_s: float | None
    ) -> bool:
        """Waits for anything at all, and takes it in. False if the time ran out."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._link.wake_fd, selectors.EVENT_READ, self._link.clear_wake)
            for connection, action in extra.items():
                selector.register(connection, selectors.EVENT_READ, action)
            if writable is not None:
                selector.register(writable, selectors.EVENT_WRITE, lambda: None)
            if self._listener is not None:
                for connection in self._listener.sockets:
                    selector.register(connection, selectors.EVENT_READ, lambda c=connection: self._greeted(c))
            for peer in self.mesh.peers.values() if self.mesh is not None else ():
                if not peer.gone and peer.connection is not writable:
                    selector.register(peer.connection, selectors.EVENT_READ, lambda p=peer: self._drain(p))
            events = selector.select(timeout_s)
            for key, _ in events:
                key.data()
            return bool(events)

    def _drain(self, peer: Peer) -> bool:
        """Takes in one packet; False if there was none."""
        try:
            packet, fd = receive(peer.connection)
        except BlockingIOError:
            return False
        if packet is None:
            peer.gone = True
        elif isinstance(packet, Left):
            self._leavers[peer.worker] = packet.step
        elif isinstance(packet, Done):
            peer.done = True
        else:
            peer.inbox.append((packet, fd))
        return True

    def _greeted(self, connection: socket.socket) -> None:
        assert self._listener is not None
        number = self.mesh.number if self.mesh is not None else 0
        self._listener.receive(
            connection,
            lambda hello: hello.run == self.run and hello.attempt == self.attempt and hello.generation >= number,
        )
