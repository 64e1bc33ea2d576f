"""How this worker comes together with the members of a generation: the higher rank connects, both greet.

A generation may outlive connections between machines (a cable that was out for a while): then all meet again in it.
"""

import socket
import time
from collections.abc import Callable

from racimo.agent.protocol import NewGeneration, Reachable
from racimo.worker.children import close_in_children, drop
from racimo.worker.context import WorkerLeaving
from racimo.worker.train.address import Address
from racimo.worker.train.buffers import Arena, Layout
from racimo.worker.train.courier import Dial
from racimo.worker.train.landing import landing_plan
from racimo.worker.train.mesh import Mesh, Regroup, Waiting
from racimo.worker.train.messages import Hello, Packet, encode
from racimo.worker.train.stream import Channel
from racimo.worker.train.switchboard import Switchboard
from racimo.worker.train.telemetry import say
from racimo.worker.train.wire import Listener, Peer, other_model, receive

MEET_AGAIN_S = 0.5
"""Before the members of a generation that fell apart try once more; a newer one may come at any moment."""


class Meeting:
    """Builds a mesh per generation."""

    def __init__(self, switchboard: Switchboard, arena: Arena, layout: Layout, num_slots: int, node: str) -> None:
        self._switchboard = switchboard
        self._arena = arena
        self._layout = layout
        self._num_slots = num_slots
        self._node = node
        self._tried: NewGeneration | None = None
        self._joined = False
        self._spans_machines = False

    def open_to_others(self, reachable: Reachable, say_address: Callable[[Address], None]) -> None:
        """Listens for workers on other machines, and no longer at an earlier address. In whatever thread: who computes
        now is to be found already."""
        listener, courier = self._switchboard.listener, self._switchboard.courier
        assert listener is not None
        address = Address(str(listener.path))
        if reachable.address:
            try:
                port = courier.listen(reachable.address, reachable.ports, reachable.key)
                address = Address(str(listener.path), reachable.address, port, reachable.node)
            except OSError as error:
                first, last = reachable.ports
                say(f"cannot listen on {reachable.address}, ports {first} to {last}, for workers elsewhere: {error}")
        say_address(address)
        courier.close_listeners(but_newest=bool(address.host))

    def next_mesh(self, waiting: Waiting) -> Mesh:
        """Waits for the newest generation and connects with all its members; raises `WorkerLeaving` if I am none.

        `waiting` is called with the indices of peers that are still missing."""
        board = self._switchboard
        while True:
            board.abandon()
            again_s = time.monotonic() + MEET_AGAIN_S if self._spans_machines else None
            board.wait(
                lambda: board.link.newest() is not self._tried or self._leaves(),
                lambda: waiting(tuple(sorted(board.lost))),
                until_s=again_s,
            )
            newest = board.link.newest()
            if self._leaves():
                raise WorkerLeaving("released")
            assert newest is not None
            self._tried = newest
            if all(member.worker != board.me for member in newest.members):
                self._spans_machines = False
                if self._joined or newest.attempt > board.attempt:
                    raise WorkerLeaving("released")
                continue  # the others' present generation; one with me will come
            self._joined = True
            board.mesh = mesh = Mesh(newest, board.me)
            self._spans_machines = any(not address.is_here(self._node) for address in mesh.addresses)
            try:
                self._connect(mesh, waiting)
            except Regroup:
                continue
            board.unreachable.clear()
            return mesh

    def _leaves(self) -> bool:
        """Whether I was asked to leave and am no member, perhaps never was."""
        link = self._switchboard.link
        newest = link.newest()
        return link.leave_requested and (
            newest is None or all(member.worker != self._switchboard.me for member in newest.members)
        )

    def _connect(self, mesh: Mesh, waiting: Waiting) -> None:
        board = self._switchboard
        listener = board.listener
        assert listener is not None or mesh.size == 1
        if listener is None:
            return
        listener.forget_before(mesh.number)
        board.courier.forget_before(mesh.number)
        remote = [rank for rank in range(mesh.size) if not mesh.addresses[rank].is_here(self._node)]
        dials = {
            rank: board.courier.dial((mesh.addresses[rank].host, mesh.addresses[rank].port))
            for rank in remote
            if rank < mesh.rank
        }
        greeted: dict[int, Channel] = {}
        probes: dict[int, Dial] = {}

        def tell() -> None:
            """Of those who should connect to me, too, I want to know whether they can be reached."""
            absent = missing()
            for rank in absent:
                if rank in remote and rank not in dials and rank not in probes:
                    place = (mesh.addresses[rank].host, mesh.addresses[rank].port)
                    probes[rank] = board.courier.dial(place)
            waiting(tuple(mesh.index_of(rank) for rank in absent))

        try:
            for rank in range(mesh.rank):
                if rank not in dials:
                    self._connect_here(mesh, rank)

            def missing() -> list[int]:
                self._accept_here(mesh, listener)
                self._accept_remote(mesh, remote)
                self._look_after(mesh, dials, greeted)
                self._note(mesh, {**dials, **probes})
                return [rank for rank in range(mesh.size) if rank != mesh.rank and rank not in mesh.peers]

            board.wait(lambda: not missing(), tell)
        finally:
            unused = [dial for rank, dial in dials.items() if rank not in mesh.peers]
            for dial in (*unused, *probes.values()):
                board.courier.give_up(dial)

    # On this machine

    def _connect_here(self, mesh: Mesh, rank: int) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        close_in_children(connection)
        try:
            connection.connect(mesh.addresses[rank].path)
            self._greet(connection, mesh.number)
        except OSError as error:  # it died; the next generation is without it
            drop(connection)
            raise Regroup from error
        connection.setblocking(False)
        arena = self._await_hello(connection, mesh, rank)
        mesh.peers[rank] = Peer(rank, mesh.members[rank], arena, connection)

    def _accept_here(self, mesh: Mesh, listener: Listener) -> None:
        for rank in range(mesh.rank + 1, mesh.size):
            if rank not in mesh.peers and (taken := listener.take(mesh.number, mesh.members[rank])):
                connection, arena = taken
                mesh.peers[rank] = Peer(rank, mesh.members[rank], arena, connection)
                try:
                    self._greet(connection, mesh.number)
                except OSError as error:
                    raise Regroup from error

    def _greet(self, connection: socket.socket, generation: int) -> None:
        socket.send_fds(connection, [encode(self._hello(generation))], [self._arena.fd])

    def _hello(self, generation: int) -> Hello:
        board = self._switchboard
        return Hello(
            run=board.run,
            attempt=board.attempt,
            generation=generation,
            worker=board.me,
            slot_bytes=self._layout.slot_bytes,
        )

    def _await_hello(self, connection: socket.socket, mesh: Mesh, rank: int) -> Arena:
        """The other side answers once it knows of this generation, and hangs up if it knows of a newer one."""
        got: list[tuple[Packet | None, int | None]] = []
        self._switchboard.pump_until(lambda: bool(got), {connection: lambda: got.append(receive(connection))})
        packet, fd = got[0]
        if not isinstance(packet, Hello) or fd is None or packet.worker != mesh.members[rank]:
            drop(connection)
            raise Regroup
        if packet.slot_bytes != self._layout.slot_bytes:
            raise other_model(packet.worker, packet.slot_bytes, self._layout.slot_bytes)
        return Arena(self._layout, fd)

    # On another machine

    def _accept_remote(self, mesh: Mesh, remote: list[int]) -> None:
        for rank in remote:
            if rank > mesh.rank and rank not in mesh.peers:
                channel = self._switchboard.courier.take(mesh.number, mesh.members[rank])
                if channel is not None and not channel.gone:
                    self._admit(mesh, rank, channel)
                    channel.post(self._hello(mesh.number))
                    self._switchboard.courier.go()

    def _look_after(self, mesh: Mesh, dials: dict[int, Dial], greeted: dict[int, Channel]) -> None:
        """Greets whom the courier has reached, and admits who has answered."""
        board = self._switchboard
        for rank, dial in dials.items():
            if rank in mesh.peers:
                continue
            if dial.channel is None:
                continue
            if rank not in greeted:
                greeted[rank] = dial.channel
                dial.channel.post(self._hello(mesh.number))
                board.courier.go()
            if dial.channel.inbox:
                self._admit(mesh, rank, dial.channel)
            elif dial.channel.gone:
                raise Regroup  # it knows of a newer generation, or has just ended

    def _note(self, mesh: Mesh, dials: dict[int, Dial]) -> None:
        for rank, dial in dials.items():
            if dial.channel is not None:
                self._switchboard.unreachable.discard(mesh.index_of(rank))
            elif dial.failure:
                self._switchboard.unreachable.add(mesh.index_of(rank))

    def _admit(self, mesh: Mesh, rank: int, channel: Channel) -> None:
        hello, _ = channel.inbox.popleft()
        worker = mesh.members[rank]
        if not isinstance(hello, Hello) or (hello.worker, hello.generation) != (worker, mesh.number):
            raise Regroup
        if hello.slot_bytes != self._layout.slot_bytes:
            raise other_model(hello.worker, hello.slot_bytes, self._layout.slot_bytes)
        arena = Arena.create(self._layout, self._num_slots)
        channel.plan = landing_plan(self._layout, arena, mesh.rank, rank)
        mesh.peers[rank] = Peer(rank, worker, arena, None, channel)
