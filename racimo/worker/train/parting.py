"""The end of a run, or a pause: nobody goes while another could still need it."""

from collections.abc import Callable

from racimo.worker.train import faults
from racimo.worker.train.mesh import Mesh, Regroup, Waiting
from racimo.worker.train.messages import Done
from racimo.worker.train.switchboard import Switchboard


def say_goodbye(switchboard: Switchboard, mesh: Mesh, step: int, waiting: Waiting, serve: Callable[[], None]) -> None:
    """Returns once every member has committed all `step` steps, or is gone. `serve` is called after each event."""
    peers = mesh.peers.values()

    def judge() -> None:
        serve()
        switchboard.refuse_leavers(step - 1)
        # The last checkpoint is the lead's to write: if it goes before that, another one does it.
        if any(peer.gone and not peer.done and peer.rank == mesh.lead for peer in peers):
            raise Regroup

    switchboard.send(Done(step=step))
    switchboard.flush()
    faults.point("parting", step)
    switchboard.wait(
        lambda: all(peer.done or (peer.gone and peer.rank != mesh.lead) for peer in peers),
        lambda: waiting(tuple(peer.index for peer in peers if not peer.done)),
        judge,
    )
