"""The packets between this worker and its peers, and every wait for them.

On one machine payloads never travel through a socket; between machines the courier's thread carries them. Every wait
also watches the agent's link, so a newer generation or a peer's end interrupts it at once.
"""

import os
import selectors
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from racimo.spec.errors import RacimoError
from racimo.state.nouns import parse_worker_id
from racimo.worker.link import Link
from racimo.worker.train.buffers import Arena
from racimo.worker.train.courier import Courier
from racimo.worker.train.mesh import Mesh, Regroup, Waiting
from racimo.worker.train.messages import MAX_PACKET_BYTES, Done, Left, Packet, StateOffer, encode
from racimo.worker.train.wire import Listener, Peer, receive

TOLD_AFTER_S = 0.1
"""A wait shorter than this is not worth a word about whom it is for."""
LEFT_GRACE_S = 2.0
"""How long a peer that left its loop may take to be seen as failed before its leaving is called the error."""
FLUSH_S = 2.0

P = TypeVar("P", bound=Packet)
Payload = Callable[[int], Sequence[memoryview]]
"""What goes behind a packet to the peer of this rank, if that is on another machine."""


class Switchboard:
    """Carries packets; all of this worker's waits are in `wait`."""

    def __init__(self, me: str, arena: Arena, link: Link, listener: Listener | None) -> None:
        self.me = me
        self.run, self.attempt, _ = parse_worker_id(me)
        self.mesh: Mesh | None = None
        self.courier = Courier()
        self.lost: frozenset[int] = frozenset()
        """Indices of workers on other machines whose connection ended before the generation did."""
        self.unreachable: set[int] = set()
        self.patient = False
        """Whether a newer generation may wait if all members of the present one are in it too: nobody waits in vain,
        and nothing on its way is lost."""
        self.link = link
        self.listener = listener
        self._arena = arena
        self._leavers: dict[str, int] = {}

    @property
    def outdated(self) -> bool:
        """Whether a newer generation than the mesh's is known or, before it is settled, other addresses of its members.
        Costs no system call."""
        newest, mesh = self.link.newest(), self.mesh
        if mesh is None:
            return True
        if newest is None or newest is mesh.generation:
            return False
        if newest.number == mesh.number:
            return not mesh.settled
        return not (mesh.settled and self.patient and mesh.goes_on_in(newest))

    def abandon(self) -> None:
        """Leaves the present generation. From here on my blocks may change, so peers must not trust what they read."""
        self._arena.serving = 0
        if self.mesh is None:
            return
        for peer in self.mesh.peers.values():
            while not peer.gone and self._drain(peer):
                pass
        self.lost = frozenset(peer.index for peer in self.mesh.peers.values() if peer.remote and peer.gone)
        for peer in self.mesh.peers.values():
            if peer.channel is not None:
                self.courier.release(peer.channel)
            peer.close()
        self.mesh = None

    def close(self) -> None:
        self.abandon()
        self.courier.close()

    # Packets

    def send(
        self,
        packet: Packet,
        ranks: Sequence[int] | None = None,
        fd: int | None = None,
        payload: Payload = lambda rank: (),
        slow: bool = False,
    ) -> None:
        """Sends to the given ranks, or to all peers. A peer that is gone is noticed where its answer is awaited.

        `slow`: between machines it goes behind whatever is urgent."""
        assert self.mesh is not None
        content = encode(packet)
        assert len(content) <= MAX_PACKET_BYTES, f"{type(packet).__name__} of {len(content)} bytes"
        # The slow way first: the courier sends while I go on.
        peers = [self.mesh.peers[rank] for rank in (self.mesh.peers if ranks is None else ranks)]
        for peer in peers:
            if peer.channel is not None and not peer.gone:
                peer.channel.post(packet, payload(peer.rank), slow)
                self.courier.go()
        for peer in peers:
            if peer.channel is None:
                self._push(peer, content, fd)

    def send_state(self, offer: StateOffer, fd: int, ranks: Sequence[int]) -> None:
        """Offers a state that lies in a memfd, which is closed."""
        assert self.mesh is not None
        self.send(offer, [rank for rank in ranks if not self.mesh.peers[rank].remote], fd)
        for rank in ranks:
            if (channel := self.mesh.peers[rank].channel) is not None:
                channel.offer_state(offer, fd)
                self.courier.go()
        os.close(fd)

    def say_left(self, step: int) -> None:
        """Tells peers that my loop was left, and keeps the connections, which end with the process."""
        if self.mesh is not None:
            self.send(Left(step=step))
            self.flush()

    def flush(self) -> None:
        """Waits, for `FLUSH_S` at most, until all that was sent to other machines is on its way."""
        mesh = self.mesh
        until_s = time.monotonic() + FLUSH_S
        while mesh is not None and time.monotonic() < until_s:
            channels = [peer.channel for peer in mesh.peers.values() if peer.channel is not None and not peer.gone]
            if not any(channel.has_urgent for channel in channels):
                return
            self._pump_once({}, None, max(until_s - time.monotonic(), 0.0))

    def _push(self, peer: Peer, payload: bytes, fd: int | None) -> None:
        assert peer.connection is not None
        while not peer.gone:
            try:
                socket.send_fds(peer.connection, [payload], [] if fd is None else [fd])
                return
            except BlockingIOError:
                if self.mesh is not None and self.outdated:
                    return  # nobody will read it any more
                self._pump_once({}, peer.connection, None)
            except OSError:
                # What it sent before it went is still to be read; the end of its stream marks it gone.
                return

    def take(self, peer: Peer, kind: type[P], wanted: Callable[[P], bool] = lambda _: True) -> tuple[P, Any] | None:
        """Removes and returns the first such packet from the peer's inbox, with what came along."""
        for position, (packet, extra) in enumerate(peer.inbox):
            if isinstance(packet, kind) and wanted(packet):
                del peer.inbox[position]
                return packet, extra
        return None

    def collect(
        self,
        kind: type[P],
        wanted: Callable[[P], bool],
        waiting: Waiting,
        step: int,
        ranks: Collection[int] | None = None,
    ) -> dict[int, P]:
        """Waits until every peer, or those of `ranks`, have sent such a packet, which are returned by rank.

        `step`: commits made so far."""
        assert self.mesh is not None
        asked = {rank: peer for rank, peer in self.mesh.peers.items() if ranks is None or rank in ranks}
        found: dict[int, P] = {}

        def complete() -> bool:
            for rank, peer in asked.items():
                if rank not in found and (taken := self.take(peer, kind, wanted)):
                    found[rank] = taken[0]
            return len(found) == len(asked)

        def absent() -> list[Peer]:
            return [peer for rank, peer in asked.items() if rank not in found]

        def judge() -> None:
            self.refuse_leavers(step, {peer.worker for peer in absent()})
            if any(peer.gone for peer in absent()):
                raise Regroup

        self.wait(complete, lambda: waiting(tuple(peer.index for peer in absent())), judge)
        return found

    def receive_from(
        self, rank: int, kind: type[P], waiting: Waiting, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[P, Any]:
        """Waits for one packet, and what comes along: a descriptor is the caller's to close. `meanwhile` is called
        after whatever else comes."""
        assert self.mesh is not None
        peer = self.mesh.peers[rank]
        found: list[tuple[P, Any]] = []

        def arrived() -> bool:
            meanwhile()
            if taken := self.take(peer, kind):
                found.append(taken)
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

    # Waiting

    def _wait_for_next(self, timeout_s: float) -> None:
        """Gives the cluster time to see how the peer ended: its own error comes first, and ends this worker too."""
        self.pump_until(lambda: self.outdated, {}, timeout_s=timeout_s)

    def wait(
        self,
        condition: Callable[[], bool],
        waiting: Callable[[], None] = lambda: None,
        judge: Callable[[], None] = lambda: None,
        until_s: float | None = None,
    ) -> None:
        """Returns once `condition` holds, or at `until_s`. Raises `Regroup` if a newer generation than the mesh's comes
        first. `judge` may raise after each event; `waiting` is told once the wait has become long, and again when it
        shows that somebody cannot be reached."""
        told: frozenset[int] | None = None
        while not condition():
            if self.mesh is not None and self.outdated:
                raise Regroup
            judge()
            timeout_s = TOLD_AFTER_S if told is None else None
            if until_s is not None:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return
                timeout_s = left_s if timeout_s is None else min(left_s, timeout_s)
            if not self._pump_once({}, None, timeout_s) or (told is not None and told != self.unreachable):
                told = frozenset(self.unreachable)
                waiting()

    def pump_until(
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

    def take_in(self) -> None:
        """Whatever has come, without waiting."""
        while self._pump_once({}, None, 0.0):
            pass

    def _pump_once(
        self, extra: dict[socket.socket, Callable[[], object]], writable: socket.socket | None, timeout_s: float | None
    ) -> bool:
        """Waits for anything at all, and takes it in. False if the time ran out."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.link.wake_fd, selectors.EVENT_READ, self.link.clear_wake)
            for connection, action in extra.items():
                selector.register(connection, selectors.EVENT_READ, action)
            if writable is not None:
                selector.register(writable, selectors.EVENT_WRITE, lambda: None)
            if self.listener is not None:
                selector.register(self.courier.wake_fd, selectors.EVENT_READ, self._from_courier)
                for connection in self.listener.sockets:
                    selector.register(connection, selectors.EVENT_READ, lambda c=connection: self._greeted(c))
            for peer in self.mesh.peers.values() if self.mesh is not None else ():
                if peer.connection is not None and not peer.gone and peer.connection is not writable:
                    selector.register(peer.connection, selectors.EVENT_READ, lambda p=peer: self._drain(p))
            events = selector.select(timeout_s)
            for key, _ in events:
                key.data()
            return bool(events)

    def _from_courier(self) -> None:
        os.eventfd_read(self.courier.wake_fd)
        if self.courier.failed is not None:
            raise RacimoError("internal", f"the courier's thread ended: {self.courier.failed}")
        for peer in self.mesh.peers.values() if self.mesh is not None else ():
            while peer.remote and not peer.gone and self._drain(peer):
                pass

    def _drain(self, peer: Peer) -> bool:
        """Takes in one packet, or the end of the stream; False if there is nothing."""
        if peer.channel is not None:
            return self._drain_channel(peer)
        assert peer.connection is not None
        try:
            packet, fd = receive(peer.connection)
        except BlockingIOError:
            return False
        if packet is None:
            peer.gone = True
        else:
            self._sort_in(peer, packet, fd)
        return True

    def _drain_channel(self, peer: Peer) -> bool:
        assert peer.channel is not None
        ended = peer.channel.gone  # before looking whether there is more
        if peer.channel.inbox:
            self._sort_in(peer, *peer.channel.inbox.popleft())
            return True
        if ended:
            peer.gone = True
            if peer.channel.silent:
                self.unreachable.add(peer.index)
        return ended

    def _sort_in(self, peer: Peer, packet: Packet, extra: Any) -> None:
        if isinstance(packet, Left):
            self._leavers[peer.worker] = packet.step
        elif isinstance(packet, Done):
            peer.done = True
        else:
            peer.inbox.append((packet, extra))

    def _greeted(self, connection: socket.socket) -> None:
        assert self.listener is not None
        number = self.mesh.number if self.mesh is not None else 0
        self.listener.receive(
            connection,
            lambda hello: hello.run == self.run and hello.attempt == self.attempt and hello.generation >= number,
        )
