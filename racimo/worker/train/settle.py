"""How the members of a new generation find out where each stands and agree on how to go on.

Whatever changed (a death, a join, both, twice), the same happens: everybody declares its step, the blocks it holds and
whether it has any state. Then, by one pure function that all evaluate alike: if nobody has state, the lowest rank
restores it; who is one commit behind takes the reduced gradient from one ahead; fresh members copy the state; and once
all stand at the same step, leaves that nobody holds are shared out. Each action is followed by another round.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from racimo.spec.errors import RacimoError
from racimo.worker.train import faults
from racimo.worker.train.buffers import REDUCED_SLOT, Store, raw
from racimo.worker.train.ledger import Ledger
from racimo.worker.train.mesh import Mesh, Regroup, Switchboard
from racimo.worker.train.messages import Declare, Gradient, Holding, Identity, Outcome, StateOffer
from racimo.worker.train.tree import FAST_LEVEL, Block, Tree, assign

Waiting = Callable[[tuple[int, ...]], None]


class Restore(msgspec.Struct, frozen=True):
    """Nobody has state: rank 0 looks for a checkpoint, or begins with the model as it is."""


class CatchUp(msgspec.Struct, frozen=True):
    """`ranks` take the reduced gradient of their step from `source`, which has committed it."""

    source: int
    ranks: tuple[int, ...]


class CopyState(msgspec.Struct, frozen=True):
    source: int
    ranks: tuple[int, ...]


class Go(msgspec.Struct, frozen=True):
    """All stand after `step` commits."""

    step: int


Verdict = Restore | CatchUp | CopyState | Go


def verdict(declarations: Sequence[Declare]) -> Verdict:
    """What happens next, given every member's declaration in rank order. Raises if two members contradict."""
    with_state = [rank for rank, declared in enumerate(declarations) if not declared.fresh]
    if not with_state:
        return Restore()
    newest = max(declarations[rank].step for rank in with_state)
    source = next(rank for rank in with_state if declarations[rank].step == newest)
    behind = tuple(rank for rank in with_state if declarations[rank].step < newest)
    fresh = tuple(rank for rank, declared in enumerate(declarations) if declared.fresh)
    if behind:
        # Every commit needs every member, so no survivor can be further behind.
        if any(declarations[rank].step != newest - 1 for rank in behind):
            steps = [declared.step for declared in declarations]
            raise RacimoError("internal", f"members of one generation are more than one commit apart: {steps}")
        return CatchUp(source, behind)
    if fresh:
        return CopyState(source, fresh)
    return Go(newest)


class Standing(Protocol):
    """This worker's side of a settlement: its position and its state."""

    step: int
    fresh: bool
    identity: Identity
    numerics: str
    last: Outcome | None

    def restore(self) -> None:
        """Load the newest checkpoint, or begin at step 0; afterwards not fresh."""

    def adopt(self, identity: Identity) -> None:
        """Take over what an unspecified part of my identity is in the run."""

    def offer_state(self) -> tuple[StateOffer, int]: ...

    def accept_state(self, offer: StateOffer, fd: int) -> None: ...


def settle(
    switchboard: Switchboard, mesh: Mesh, store: Store, ledger: Ledger, standing: Standing, waiting: Waiting
) -> list[tuple[Holding, ...]] | None:
    """Runs rounds until all stand at the same step, and returns what each rank holds of the next one.

    None if I first have to apply a gradient that I was given; then call again after the commit. Raises `Regroup` when
    the generation ends before."""
    while True:
        mesh.round += 1
        declared = Declare(
            round=mesh.round,
            step=standing.step,
            fresh=standing.fresh,
            identity=standing.identity,
            numerics=standing.numerics,
            holdings=ledger.holdings(),
            last=standing.last,
        )
        switchboard.send(declared)
        faults.point("declared", standing.step)
        theirs = switchboard.collect(Declare, declared.answers, waiting, standing.step)
        declarations = [declared if rank == mesh.rank else theirs[rank] for rank in range(mesh.size)]
        _check_classes(declarations, mesh, standing)
        match verdict(declarations):
            case Restore():
                if mesh.rank == 0:
                    standing.restore()
            case CatchUp(source, ranks):
                if mesh.rank == source:
                    far = [rank for rank in ranks if mesh.peers[rank].remote]
                    _give_gradient(switchboard, store, far, standing.step)
                if mesh.rank in ranks:
                    _take_gradient(switchboard, store, mesh, source, declarations[source], standing, waiting)
                    return None
            case CopyState(source, ranks):
                _copy_state(switchboard, mesh, source, ranks, standing, waiting)
                if mesh.rank in ranks:
                    # For what was agreed in it (a pause); nobody is behind now, so nobody will ask for its gradient.
                    standing.last = declarations[source].last
            case Go():
                mesh.settled = True
                mesh.active = tuple(range(mesh.size))
                return [declaration.holdings for declaration in declarations]


def missing_leaves(tree: Tree, mesh: Mesh, ledger: Ledger, holdings: Sequence[Sequence[Holding]]) -> list[int]:
    """The leaves that I am to compute, after dropping blocks that another rank holds too."""
    blocks: list[dict[Block, tuple[int, ...]]] = [
        {(held.level, rank if held.level == FAST_LEVEL else held.index): held.leaves for held in theirs}
        for rank, theirs in enumerate(holdings)
    ]
    assignment = assign(tree, blocks)
    kept = {(level, 0 if level == FAST_LEVEL else index) for level, index in assignment.kept[mesh.rank]}
    ledger.keep(kept)
    return list(assignment.missing[mesh.rank])


def _check_classes(declarations: Sequence[Declare], mesh: Mesh, standing: Standing) -> None:
    reference = next((rank for rank, declared in enumerate(declarations) if not declared.fresh), 0)
    theirs = declarations[reference]
    if standing.fresh:
        standing.adopt(theirs.identity)
        if theirs.numerics != standing.numerics:
            raise RacimoError(
                "numerics-class",
                f"this worker computes as [{standing.numerics}], the run as [{theirs.numerics}]: "
                "their sums would differ in the last bits",
                "give all workers the same devices, torch version, threads and optimizer flags",
            )
    if theirs.identity != standing.identity:
        raise RacimoError(
            "steps-misused",
            f"{mesh.members[mesh.rank]} trains something else than {mesh.members[reference]}: "
            + difference(standing.identity, theirs.identity),
            "build the same model and the same batches on every worker",
        )


def difference(ours: Identity, theirs: Identity) -> str:
    """The fields in which two identities differ, with both values."""
    return "; ".join(
        f"{name.replace('_', ' ')} {getattr(ours, name)} against {getattr(theirs, name)}"
        for name in Identity.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    )


def _give_gradient(switchboard: Switchboard, store: Store, ranks: Sequence[int], step: int) -> None:
    whole = raw(store.arena.flats(REDUCED_SLOT))
    switchboard.send(Gradient(step=step), ranks, payload=lambda _: whole)


def _take_gradient(
    switchboard: Switchboard,
    store: Store,
    mesh: Mesh,
    source: int,
    declared: Declare,
    standing: Standing,
    waiting: Waiting,
) -> None:
    assert declared.last is not None and declared.last.step == standing.step + 1
    peer = mesh.peers[source]
    if peer.remote:
        switchboard.receive_from(source, Gradient, waiting)
    for mine, theirs in zip(store.arena.flats(REDUCED_SLOT), peer.arena.flats(REDUCED_SLOT), strict=True):
        mine.copy_(theirs)
    if not peer.remote and peer.arena.reduced_step != standing.step + 1:
        raise Regroup
    faults.point("took-gradient", standing.step)
    store.arena.reduced_step = standing.step + 1
    standing.last = declared.last


def _copy_state(
    switchboard: Switchboard,
    mesh: Mesh,
    source: int,
    ranks: tuple[int, ...],
    standing: Standing,
    waiting: Waiting,
) -> None:
    if mesh.rank == source:
        offer, fd = standing.offer_state()
        switchboard.send_state(offer, fd, ranks)
        faults.point("offered-state", standing.step)
    elif mesh.rank in ranks:
        offer, fd = switchboard.receive_from(source, StateOffer, waiting)
        faults.point("got-state", offer.step)
        standing.accept_state(offer, fd)
