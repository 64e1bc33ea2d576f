"""How one that joins comes to the present without holding the others up.

It receives every reduced gradient like everybody, a snapshot of the state streams in meanwhile, and then its loop runs
the missed steps with the stored gradients and without micro-shards. Once it is near the present it says so, and is
counted on from the step after the one with whose contributions that was agreed.
"""

import mmap
import os

import msgspec
import torch

from racimo.worker.train import faults
from racimo.worker.train.buffers import REDUCED_SLOT, Layout, Store, raw
from racimo.worker.train.landing import new_part
from racimo.worker.train.mesh import Mesh, Regroup, Waiting
from racimo.worker.train.messages import Again, Near, Outcome, Reduced
from racimo.worker.train.switchboard import Switchboard

MAX_BACKLOG_BYTES = 2 * 2**30
"""Of gradients that wait to be replayed; what comes beyond is dropped, and a new snapshot is needed."""
MAX_QUEUED_BYTES = 512 * 2**20
"""Gradients on their way to one that trails; while more are, it is only told that there was another."""
MOST_LOST = 2
"""How often one that trails may lose the thread before all wait for it."""
NEAR_STEPS = 1
"""Steps that still wait when one that trails may be counted on."""

Part = list[torch.Tensor]


class _Stored:
    def __init__(self) -> None:
        self.parts: dict[int, tuple[int, Part]] = {}
        """By rank of the sender: position and content."""
        self.num_parts = 0
        self.outcome: Outcome | None = None

    @property
    def whole(self) -> bool:
        return self.outcome is not None and len(self.parts) == self.num_parts


class Backlog:
    """Gradients of steps that are still to be replayed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._steps: dict[int, _Stored] = {}
        self._newest_of: dict[int, int] = {}
        self._bytes = 0
        self.bounded = True

    def put(self, rank: int, reduced: Reduced, part: Part | None) -> None:
        """`part` None: it was left out."""
        self._newest_of[rank] = reduced.step
        if part is None:
            return
        size = _size(part)
        if self.bounded and self._bytes + size > MAX_BACKLOG_BYTES:
            return
        self._bytes += size
        stored = self._steps.setdefault(reduced.step, _Stored())
        stored.parts[rank] = reduced.position, part
        stored.num_parts = reduced.num_parts
        stored.outcome = reduced.outcome or stored.outcome

    def whole(self, step: int) -> bool:
        return step in self._steps and self._steps[step].whole

    def reach(self, step: int) -> int:
        """The step to which one that has committed `step` can be brought."""
        while self.whole(step + 1):
            step += 1
        return step

    def newest(self, step: int) -> int:
        """The newest step that anybody spoke of, at least `step`."""
        return max(step, *self._newest_of.values()) if self._newest_of else step

    def lacks(self, step: int, senders: tuple[int, ...]) -> bool:
        """Whether a part of this step's gradient will never come: its sender has gone on to a later step."""
        if self.whole(step):
            return False
        here = self._steps[step].parts if step in self._steps else {}
        return any(rank not in here and self._newest_of.get(rank, 0) > step for rank in senders)

    def absent(self, step: int, senders: tuple[int, ...]) -> list[int]:
        here = self._steps[step].parts if step in self._steps else {}
        return [rank for rank in senders if rank not in here]

    def take(self, step: int) -> Outcome:
        """Puts the step's gradient into the reduced slot."""
        stored = self._steps.pop(step)
        assert stored.outcome is not None
        arena, layout = self._store.arena, self._store.layout
        arena.reduced_step = 0
        for position, part in stored.parts.values():
            places = layout.part(arena.flats(REDUCED_SLOT), position, stored.num_parts)
            for place, content in zip(places, part, strict=True):
                place.copy_(content)
            self._bytes -= _size(part)
        arena.reduced_step = step
        return stored.outcome

    def keep(self, after: int, upto: int) -> None:
        """Drops all but whole gradients of steps in (after, upto]; a new generation numbers its ranks anew."""
        self._steps = {n: s for n, s in self._steps.items() if s.whole and after < n <= upto}
        for stored in self._steps.values():
            assert stored.outcome is not None
            stored.outcome = msgspec.structs.replace(stored.outcome, enters=())
        self._newest_of.clear()
        self._bytes = sum(_size(part) for stored in self._steps.values() for _, part in stored.parts.values())

    def forget_until(self, step: int) -> None:
        """Drops what a state of so many commits makes superfluous."""
        for number in [number for number in self._steps if number <= step]:
            self._bytes -= sum(_size(part) for _, part in self._steps.pop(number).parts.values())


class Trail:
    """The way of this worker, while it trails, behind the active members."""

    def __init__(self, switchboard: Switchboard, store: Store) -> None:
        self.backlog = Backlog(store)
        self._switchboard = switchboard
        self._layout = store.layout
        self._followed: frozenset[str] = frozenset()
        self._said_near_in: Mesh | None = None
        self._num_lost = 0

    def begin(self, mesh: Mesh, step: int) -> None:
        """In a new generation I trail again; what still helps is kept. `step`: my commits, -1 without a state."""
        self._followed = frozenset(mesh.members[rank] for rank in mesh.active)
        self.backlog.bounded = True
        self.backlog.keep(step, mesh.began_at if step >= 0 else -1)

    def end(self) -> None:
        self._num_lost = 0
        self._followed = frozenset()
        self.backlog.keep(0, 0)

    def orphaned(self) -> bool:
        """Whether the newest generation has nobody left of those that I followed: then I may be the furthest."""
        newest = self._switchboard.link.newest()
        members = {member.worker for member in newest.members} if newest is not None else set()
        return bool(self._followed) and members.isdisjoint(self._followed)

    def next(self, mesh: Mesh, step: int, waiting: Waiting) -> Outcome | None:
        """Waits for the gradient of step `step` + 1, and puts it in place. None if it will never come whole."""
        wanted = step + 1
        self._switchboard.take_in()
        self.sort_in(mesh)
        if self._said_near_in is not mesh and self.backlog.newest(step) - step <= NEAR_STEPS:
            self._said_near_in = mesh
            self.backlog.bounded = False
            self._switchboard.send(Near(step=step), mesh.active)

        def here() -> bool:
            self.sort_in(mesh)
            return self.backlog.whole(wanted) or self.backlog.lacks(wanted, mesh.active)

        def absent() -> tuple[int, ...]:
            return tuple(mesh.index_of(rank) for rank in self.backlog.absent(wanted, mesh.active))

        def judge() -> None:
            self._switchboard.refuse_leavers(step, {mesh.members[rank] for rank in mesh.active})
            if any(mesh.peers[rank].gone for rank in self.backlog.absent(wanted, mesh.active)):
                raise Regroup

        self._switchboard.wait(here, lambda: waiting(absent()), judge)
        if not self.backlog.whole(wanted):
            return None
        outcome = self.backlog.take(wanted)
        mesh.enter(outcome)
        faults.point("followed", step)
        return outcome

    def ask_again(self, mesh: Mesh, step: int) -> int:
        """Asks an active member, whose rank is returned, for the state anew."""
        self.backlog.keep(0, 0)
        self.backlog.bounded = True
        self._said_near_in = None
        self._num_lost += 1
        halt = self._num_lost >= MOST_LOST
        donor = mesh.lead if halt else mesh.nearest(mesh.rank, mesh.active)
        self._switchboard.send(Again(step=step, halt=halt), [donor])
        return donor

    def sort_in(self, mesh: Mesh) -> None:
        """Stores the gradients that have come."""
        for rank, peer in mesh.peers.items():
            while taken := self._switchboard.take(peer, Reduced):
                reduced, extra = taken
                part = _open_part(self._layout, reduced, extra) if isinstance(extra, int) else extra
                self.backlog.put(rank, reduced, part)


def feed(switchboard: Switchboard, store: Store, mesh: Mesh, outcome: Outcome) -> None:
    """Gives my part of a reduced gradient to all that trail. It is a copy: nobody waits until they have it."""
    trailing = [mesh.peers[rank] for rank in mesh.trailing if not mesh.peers[rank].gone]
    if not trailing:
        return
    position, num_parts = mesh.active.index(mesh.rank), len(mesh.active)
    part = store.layout.part(store.arena.flats(REDUCED_SLOT), position, num_parts)
    packet = Reduced(
        step=outcome.step,
        position=position,
        num_parts=num_parts,
        outcome=outcome if mesh.rank == mesh.lead else None,
    )
    far = {peer.rank: peer.channel.slow_bytes for peer in trailing if peer.channel is not None}
    # Who is counted on from the next step is waited for anyway.
    fed = [rank for rank, queued in far.items() if queued <= MAX_QUEUED_BYTES or rank in outcome.enters]
    if fed:
        copy = raw([tensor.clone() for tensor in part])
        switchboard.send(packet, fed, payload=lambda _: copy, slow=True)
    left_out = [rank for rank in far if rank not in fed]
    mesh.left_out |= dict.fromkeys(left_out, outcome.step)
    switchboard.send(msgspec.structs.replace(packet, num_parts=0), left_out, slow=True)
    here = [peer.rank for peer in trailing if not peer.remote]
    if here:
        fd = _sealed_part(part)
        switchboard.send(packet, here, fd)
        os.close(fd)


def _size(part: Part) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in part)


def _sealed_part(part: Part) -> int:
    """A memfd with the bytes of a part."""
    fd = os.memfd_create("racimo-part", os.MFD_CLOEXEC)
    for view in raw(part):
        while len(view):
            view = view[os.write(fd, view) :]
    return fd


def _open_part(layout: Layout, reduced: Reduced, fd: int) -> Part:
    """Copies it into private memory, and closes the descriptor."""
    part = new_part(layout, reduced.position, reduced.num_parts)
    try:
        if size := os.fstat(fd).st_size:
            with mmap.mmap(fd, size, prot=mmap.PROT_READ) as memory:
                offset = 0
                for view in raw(part):
                    view[:] = memory[offset : offset + len(view)]
                    offset += len(view)
    finally:
        os.close(fd)
    return part
