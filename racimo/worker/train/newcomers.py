"""What an active member does for those that trail: it counts on them once they are near, and gives the state anew."""

from racimo.worker.train.mesh import Mesh
from racimo.worker.train.messages import Again, Near
from racimo.worker.train.settle import Standing, give_state
from racimo.worker.train.switchboard import Switchboard


class Newcomers:
    """This member's side of `trail.Trail`."""

    def __init__(self, switchboard: Switchboard) -> None:
        self._switchboard = switchboard
        self._owed: tuple[int, ...] = ()

    def to_enter(self, mesh: Mesh, step: int) -> dict[int, int]:
        """For the lead: those that have come near enough to the present to be counted on from the next step, and how
        many commits they have or, given the state of the next boundary, will have. `step`: my own commits."""
        peers = [mesh.peers[rank] for rank in mesh.trailing if not mesh.peers[rank].gone]
        near = {peer.rank: said[0].step for peer in peers if (said := self._switchboard.take(peer, Near))}
        # Whoever cannot come near is given the state of the next boundary, and counted on from there.
        self._owed = tuple(peer.rank for peer in peers if self._switchboard.take(peer, Again, lambda asked: asked.halt))
        return near | dict.fromkeys(self._owed, step + 1)

    def serve(self, mesh: Mesh | None, standing: Standing, ends: bool) -> None:
        """At a boundary: the state to those that have lost the thread, and to those for whom all wait now. `mesh` None:
        its members are no longer together. `ends`: there is no further step to enter with."""
        owed, self._owed = self._owed, ()
        if mesh is None or mesh.trails:
            return
        peers = [mesh.peers[rank] for rank in mesh.trailing]
        asking = [p.rank for p in peers if self._switchboard.take(p, Again, lambda asked: ends or not asked.halt)]
        if asking:
            give_state(self._switchboard, asking, standing)
        if owed:
            give_state(self._switchboard, owed, standing, with_gradient=True)
