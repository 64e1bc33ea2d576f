"""Whether all workers still hold the same model: sums over its bits, compared.

They go with a contribution to a step, thus cost no wait of their own, and before parting in a round of their own.
"""

from collections.abc import Callable, Mapping

import torch

from racimo.spec.errors import RacimoError
from racimo.worker.train.mesh import Mesh, Waiting
from racimo.worker.train.messages import Compared
from racimo.worker.train.state import checksum
from racimo.worker.train.switchboard import Switchboard


def model_checksum(model: torch.nn.Module, exact: bool) -> int:
    """Over all parameters and, where they have to be equal too, the buffers that are saved with them."""
    tensors: list[torch.Tensor] = list(model.parameters())
    if exact:
        for module in model.modules():
            passing = module._non_persistent_buffers_set
            tensors += [b for name, b in module._buffers.items() if b is not None and name not in passing]
    return checksum(tensors)


def compare(sums: Mapping[int, int | None], mesh: Mesh, step: int) -> None:
    """Raises `workers-diverged` with the ranks that differ from most. None: that rank gave no sum."""
    given = [value for value in sums.values() if value is not None]
    if len(set(given)) <= 1:
        return
    usual = max(set(given), key=lambda value: (given.count(value), -given.index(value)))
    others = [rank for rank, value in sums.items() if value not in (None, usual)]
    names = ", ".join(f"rank {rank} ({mesh.members[rank]})" for rank in others)
    raise RacimoError(
        "workers-diverged",
        f"after step {step} the parameters of {names} differ from those of the other {len(sums) - len(others)} workers",
        "something changes the model differently per worker: unseeded randomness, code that asks for the rank, or a "
        "schedule or the like that is missing in run.steps(..., state={...}) and begins anew in a worker that joins",
    )


def compare_before_parting(
    switchboard: Switchboard, mesh: Mesh, mine: Compared, waiting: Waiting, serve: Callable[[], None]
) -> None:
    """All tell their sums after the last commit. Who is gone already has no say. `serve` is called after each event.
    Raises `Regroup` as any wait does."""
    found: dict[int, int] = {}

    def missing() -> list[int]:
        for rank, peer in mesh.peers.items():
            if rank not in found and (taken := switchboard.take(peer, Compared, lambda said: said.step == mine.step)):
                found[rank] = taken[0].checksum
        return [rank for rank, peer in mesh.peers.items() if rank not in found and not peer.gone]

    def judge() -> None:
        serve()
        switchboard.refuse_leavers(mine.step - 1)

    switchboard.send(mine)
    switchboard.wait(
        lambda: not missing(),
        lambda: waiting(tuple(mesh.peers[rank].index for rank in missing())),
        judge,
    )
    compare({mesh.rank: mine.checksum, **found}, mesh, mine.step)
