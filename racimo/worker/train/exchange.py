"""The exchange at the end of a step: everybody's blocks become one gradient, in the order of the tree.

Two rounds. *Contribute*: each member says where its blocks lie, and sends to those on other machines the part that they
sum. Once all have, each sums its part of all blocks of all members, straight from their memory or what they sent, in
tree order, into its own reduced slot, and says *summed*; to other machines it sends them. Once all have, each copies
the other parts. See docs/training.md for why nothing is overwritten too early.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from racimo.spec.errors import RacimoError
from racimo.worker.train import faults
from racimo.worker.train.buffers import REDUCED_SLOT, Arena, Store, raw
from racimo.worker.train.compare import compare
from racimo.worker.train.landing import blocks_part
from racimo.worker.train.mesh import Mesh, Regroup
from racimo.worker.train.messages import Contribution, Holding, Outcome, Summed
from racimo.worker.train.switchboard import Switchboard
from racimo.worker.train.trail import feed
from racimo.worker.train.tree import FAST_LEVEL, Sum, Tree, chain, evaluate

_PIECE_BYTES = 256 * 1024
"""Summed at a time, so that intermediate sums stay in the second-level cache."""

Source = tuple[int, int]  # rank, slot
Expression = Source | Sum[Source]
Waiting = Callable[[tuple[int, ...]], None]


def exchange(
    switchboard: Switchboard,
    store: Store,
    tree: Tree,
    nominal_weight: float,
    mine: Contribution,
    waiting: Waiting,
) -> Outcome:
    """Runs both rounds for the step after `mine.step` commits; the gradient ends in the reduced slot.

    Raises `Regroup` if the generation ends before; then nothing of the step is lost that I hold.
    """
    mesh = switchboard.mesh
    assert mesh is not None and mesh.settled and not mesh.trails
    step, others = mine.step, mesh.others
    for holding in mine.holdings:
        store.publish(holding.slot)
    store.arena.serving = mesh.number
    switchboard.send(mine, others, payload=lambda rank: _blocks_for(store, mesh, mine.holdings, rank))
    faults.point("contributed", step)
    theirs = switchboard.collect(Contribution, lambda packet: packet.step == step, waiting, step, others)
    contributions = {rank: mine if rank == mesh.rank else theirs[rank] for rank in mesh.active}
    assert all(given.active == mesh.active for given in contributions.values())
    compare({rank: given.checksum for rank, given in contributions.items()}, mesh, step)
    # All have committed the step before, so nobody needs its gradient from me any more.
    store.arena.reduced_step = 0
    expression, outcome = _combine(contributions, tree, mesh)
    if outcome.weight <= 0.0:
        raise RacimoError(
            "steps-misused",
            f"the weights of step {step + 1} add up to {outcome.weight}",
            "give backward(loss, weight=) the positive count of samples or tokens that the loss averages",
        )
    _sum_my_part(store, mesh, expression, outcome.weight / nominal_weight)
    faults.point("summing", step)
    _check_serving(mesh)
    switchboard.send(
        Summed(step=step, active=mesh.active),
        others,
        payload=lambda _: raw(_part_of(store.arena, store, mesh, mesh.rank)),
    )
    feed(switchboard, store, mesh, outcome)
    switchboard.collect(Summed, lambda packet: packet.step == step, waiting, step, others)
    faults.point("summed", step)
    for rank in others:
        _copy_part(store, mesh, rank)
    _check_serving(mesh)
    store.arena.reduced_step = step + 1
    mesh.enter(outcome)
    return outcome


def _blocks_for(store: Store, mesh: Mesh, holdings: Sequence[Holding], rank: int) -> list[memoryview]:
    return blocks_part(store.layout, store.arena, holdings, mesh.active.index(rank), len(mesh.active))


def _part_of(arena: Arena, store: Store, mesh: Mesh, rank: int) -> list[torch.Tensor]:
    """The part of the gradient that `rank` sums, in the reduced slot of this arena."""
    return store.layout.part(arena.flats(REDUCED_SLOT), mesh.active.index(rank), len(mesh.active))


def _combine(contributions: Mapping[int, Contribution], tree: Tree, mesh: Mesh) -> tuple[Expression, Outcome]:
    held: dict[tuple[int, int], tuple[int, Holding]] = {}
    for rank, contribution in contributions.items():
        for holding in contribution.holdings:
            index = rank if holding.level == FAST_LEVEL else holding.index
            held[holding.level, index] = rank, holding
    exact = all(level != FAST_LEVEL for level, _ in held)

    def arrange(values: dict[tuple[int, int], object]):  # type: ignore[no-untyped-def]
        return tree.expression(values) if exact else chain(list(values.values()))

    sources = arrange({block: (rank, holding.slot) for block, (rank, holding) in held.items()})
    add = float.__add__
    weight = evaluate(arrange({block: holding.weight for block, (_, holding) in held.items()}), add)
    weighted_loss = evaluate(arrange({block: holding.weighted_loss for block, (_, holding) in held.items()}), add)
    used = bytearray(len(next(iter(held.values()))[1].used))
    for _, holding in held.values():
        used = bytearray(a | b for a, b in zip(used, holding.used, strict=True))
    outcome = Outcome(
        step=contributions[mesh.rank].step + 1,
        generation=mesh.number,
        weight=weight,
        loss=weighted_loss / weight if weight else float("nan"),
        num_samples=sum(holding.num_samples for _, holding in held.values()),
        used=bytes(used),
        pause=any(given.pause for given in contributions.values()),
        save=any(given.save for given in contributions.values()),
        contributions={
            mesh.members[rank].rsplit("/", 1)[1]: tuple(sorted(leaf for h in given.holdings for leaf in h.leaves))
            for rank, given in contributions.items()
        },
        enters=entering(contributions, mesh),
    )
    return sources, outcome


def entering(contributions: Mapping[int, Contribution], mesh: Mesh) -> tuple[int, ...]:
    """Whom the lead proposes, but for those who cannot replay a step because somebody left its gradient out."""
    return tuple(
        rank
        for rank, commits in sorted(contributions[mesh.lead].enters.items())
        if all(given.left_out.get(rank, 0) <= commits for given in contributions.values())
    )


def _sum_my_part(store: Store, mesh: Mesh, expression: Expression, divisor: float) -> None:
    flats = {
        (rank, slot): (store.arena if rank == mesh.rank else mesh.peers[rank].arena).flats(slot)
        for rank, slot in _sources(expression)
    }
    for number, section in enumerate(store.layout.sections):
        low, high = store.layout.bounds(section, mesh.active.index(mesh.rank), len(mesh.active))
        piece = _PIECE_BYTES // section.dtype.itemsize
        scratch = [torch.empty(piece, dtype=section.dtype) for _ in range(_depth(expression))]
        reduced = store.arena.flats(REDUCED_SLOT)[number]
        operands = {source: tensors[number] for source, tensors in flats.items()}
        for start in range(low, high, piece):
            end = min(start + piece, high)
            pieces = {source: tensor[start:end] for source, tensor in operands.items()}
            out = reduced[start:end]
            total = _sum_piece(expression, pieces, out, [buffer[: end - start] for buffer in scratch])
            torch.div(total, divisor, out=out)


def _sum_piece(
    expression: Expression, pieces: dict[Source, torch.Tensor], out: torch.Tensor, scratch: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The value of the expression; in `out` unless it is an operand itself, which is never written to."""
    if not isinstance(expression, Sum):
        return pieces[expression]
    left = _sum_piece(expression.left, pieces, out, scratch)
    right = _sum_piece(expression.right, pieces, scratch[0], scratch[1:])
    return torch.add(left, right, out=out)


def _depth(expression: Expression) -> int:
    """Scratch buffers that `_sum_piece` needs."""
    if not isinstance(expression, Sum):
        return 0
    return max(_depth(expression.left), 1 + _depth(expression.right))


def _sources(expression: Expression) -> list[Source]:
    if isinstance(expression, Sum):
        return _sources(expression.left) + _sources(expression.right)
    return [expression]


def _copy_part(store: Store, mesh: Mesh, rank: int) -> None:
    theirs = _part_of(mesh.peers[rank].arena, store, mesh, rank)
    for mine, summed in zip(_part_of(store.arena, store, mesh, rank), theirs, strict=True):
        mine.copy_(summed)


def _check_serving(mesh: Mesh) -> None:
    """A peer that has gone on to a newer generation may have changed what I just read: then it does not count.

    Its word was cleared before its blocks changed, and is read after them (both in program order, which x86 keeps for
    stores and for loads; elsewhere the packets in between are barriers). What came from another machine is a copy."""
    peers = [mesh.peers[rank] for rank in mesh.others]
    if any(peer.arena.serving != mesh.number for peer in peers if not peer.remote):
        raise Regroup
