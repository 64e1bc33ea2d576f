"""How the members of a new generation find out where each stands and agree on how to go on.

Whatever changed (a death, a join, both, twice), the same happens: everybody declares its step, the blocks it holds and
whether it has any state. Then, by one pure function that all evaluate alike: if nobody has state, one of them restores
it; who is one commit behind takes the reduced gradient from one ahead; at the very beginning the others copy the state,
later they trail (`trail.py`); and leaves that nobody holds are shared out. Each action is followed by another round.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from racimo.spec.errors import RacimoError
from racimo.worker.train import faults
from racimo.worker.train.buffers import REDUCED_SLOT, Store, raw
from racimo.worker.train.checkpoint import NOTHING
from racimo.worker.train.identity import difference
from racimo.worker.train.ledger import Ledger
from racimo.worker.train.mesh import Mesh, Regroup, Waiting
from racimo.worker.train.messages import Declare, Gradient, Holding, Identity, Outcome, StateOffer
from racimo.worker.train.switchboard import Switchboard
from racimo.worker.train.tree import FAST_LEVEL, Block, Tree, assign


class Restore(msgspec.Struct, frozen=True):
    """Nobody has state: `rank`, whose checkpoint is the newest, loads it, or begins with the model as it is."""

    rank: int


class CatchUp(msgspec.Struct, frozen=True):
    """`ranks` take the reduced gradient of their step from `source`, which has committed it."""

    source: int
    ranks: tuple[int, ...]


class CopyState(msgspec.Struct, frozen=True):
    """Nothing was computed yet: `ranks` copy the state from `source`, and all begin together."""

    source: int
    ranks: tuple[int, ...]


class Go(msgspec.Struct, frozen=True):
    """The active ranks stand after `step` commits. Those that `lack` state get a snapshot; they and those that `follow`
    with gradients they have stored trail."""

    step: int
    active: tuple[int, ...]
    lack: tuple[int, ...] = ()
    follow: tuple[int, ...] = ()


Verdict = Restore | CatchUp | CopyState | Go


def verdict(declarations: Sequence[Declare]) -> Verdict:
    """What happens next, given every member's declaration in rank order. Raises if two members contradict."""
    ranks = range(len(declarations))
    with_state = [rank for rank in ranks if not declarations[rank].fresh]
    if not with_state:
        return Restore(max(ranks, key=lambda rank: (declarations[rank].shelf, -rank)))
    hollow = _hollow(declarations, with_state)
    with_state = [rank for rank in with_state if rank not in hollow]
    newest = max(declarations[rank].step for rank in with_state)
    level = tuple(rank for rank in with_state if declarations[rank].step == newest)
    behind = [rank for rank in with_state if rank not in level]
    follow = tuple(rank for rank in behind if declarations[rank].reaches >= newest)
    close = tuple(rank for rank in behind if rank not in follow and declarations[rank].step == newest - 1)
    givers = [rank for rank in level if declarations[rank].gives]
    if close and givers:
        return CatchUp(givers[0], close)
    far = [rank for rank in behind if rank not in follow]
    # Every commit needs every active member, so none of them can be further behind; and while one of them is behind,
    # nobody overwrites the gradient that it lacks.
    if any(declarations[rank].reaches < 0 for rank in far):
        steps = [declared.step for declared in declarations]
        raise RacimoError("internal", f"members of one generation are more than one commit apart: {steps}")
    lack = tuple(rank for rank in ranks if declarations[rank].fresh or rank in far or rank in hollow)
    if lack and all(declarations[rank].untouched for rank in with_state):
        return CopyState(level[0], lack)
    return Go(newest, level, lack, follow)


def _hollow(declarations: Sequence[Declare], with_state: Sequence[int]) -> list[int]:
    """Those ahead of all others by a state that they were given by one who is gone now, without the gradient that would
    bring the others there: the others make that step themselves, and give them their state in turn."""
    newest = max(declarations[rank].step for rank in with_state)
    level = [rank for rank in with_state if declarations[rank].step == newest]
    waits = any(declarations[rank].step == newest - 1 and declarations[rank].reaches < 0 for rank in with_state)
    alone = all(declarations[rank].given and not declarations[rank].gives for rank in level)
    return level if waits and alone else []


class Standing(Protocol):
    """This worker's side of a settlement: its position and its state."""

    step: int
    fresh: bool
    identity: Identity
    numerics: str
    last: Outcome | None
    given: bool
    untouched: bool

    @property
    def reaches(self) -> int: ...

    @property
    def shelf(self) -> tuple[int, int]: ...

    def restore(self) -> None:
        """Load the newest checkpoint, or begin at step 0. Still fresh if that checkpoint turns out to be torn."""

    def adopt(self, identity: Identity) -> None:
        """Take over what an unspecified part of my identity is in the run."""

    def offer_state(self, with_gradient: bool) -> tuple[StateOffer, int]: ...

    def accept_state(self, offer: StateOffer, fd: int) -> None: ...


def settle(
    switchboard: Switchboard, mesh: Mesh, store: Store, ledger: Ledger, standing: Standing, waiting: Waiting
) -> list[tuple[Holding, ...]] | None:
    """Runs rounds until the active members stand at the same step, and returns what each rank holds of the next one.

    None if I first have to apply a gradient that I was given; then call again after the commit. Raises `Regroup` when
    the generation ends before."""
    while True:
        mesh.round += 1
        declared = Declare(
            round=mesh.round,
            step=standing.step,
            fresh=standing.fresh,
            untouched=standing.untouched,
            reaches=standing.reaches,
            shelf=standing.shelf if standing.fresh else NOTHING,
            identity=standing.identity,
            numerics=standing.numerics,
            holdings=ledger.holdings(),
            last=standing.last,
            gives=store.arena.reduced_step == standing.step and standing.last is not None,
            given=standing.given,
        )
        switchboard.send(declared)
        faults.point("declared", standing.step)
        theirs = switchboard.collect(Declare, declared.answers, waiting, standing.step)
        declarations = [declared if rank == mesh.rank else theirs[rank] for rank in range(mesh.size)]
        _check_classes(declarations, mesh, standing)
        match verdict(declarations):
            case Restore(rank):
                if mesh.rank == rank:
                    standing.restore()
            case CatchUp(source, ranks):
                if mesh.rank == source:
                    _give_gradient(switchboard, store, mesh, ranks, standing.step)
                if mesh.rank in ranks:
                    _take_gradient(switchboard, store, mesh, source, declarations[source], standing, waiting)
                    return None
            case CopyState(source, ranks):
                if mesh.rank == source:
                    give_state(switchboard, ranks, standing)
                if mesh.rank in ranks:
                    take_state(switchboard, source, standing, waiting)
            case Go() as go:
                mesh.settled = True
                mesh.active, mesh.began_at = go.active, go.step
                standing.fresh = standing.fresh or mesh.rank in go.lack
                if standing.last is not None:
                    # Who was to enter in an earlier meeting of this generation is active by now, or trails anew.
                    standing.last = msgspec.structs.replace(standing.last, enters=())
                mine = [rank for rank in go.lack if mesh.nearest(rank, mesh.active) == mesh.rank]
                if mine:
                    give_state(switchboard, mine, standing)
                return [declaration.holdings for declaration in declarations]


def missing_leaves(tree: Tree, mesh: Mesh, ledger: Ledger, holdings: Sequence[Sequence[Holding]]) -> list[int]:
    """The leaves that I am to compute, after dropping blocks that another rank holds too."""
    blocks: list[dict[Block, tuple[int, ...]]] = [
        {(held.level, rank if held.level == FAST_LEVEL else held.index): held.leaves for held in holdings[rank]}
        for rank in mesh.active
    ]
    assignment = assign(tree, blocks)
    position = mesh.active.index(mesh.rank)
    kept = {(level, 0 if level == FAST_LEVEL else index) for level, index in assignment.kept[position]}
    ledger.keep(kept)
    return list(assignment.missing[position])


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


def _give_gradient(switchboard: Switchboard, store: Store, mesh: Mesh, ranks: Sequence[int], step: int) -> None:
    """Those on this machine take it themselves."""
    far = [rank for rank in ranks if mesh.peers[rank].remote]
    whole = raw(store.arena.flats(REDUCED_SLOT))
    switchboard.send(Gradient(step=step), far, payload=lambda _: whole)


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


def give_state(switchboard: Switchboard, ranks: Sequence[int], standing: Standing, with_gradient: bool = False) -> None:
    """Offers my present state, which is copied before this returns. `with_gradient`: to those that compute with it from
    the next step on; who trails has later ones before anybody relies on it."""
    offer, fd = standing.offer_state(with_gradient)
    switchboard.send_state(offer, fd, ranks)
    faults.point("offered-state", standing.step)


def take_state(
    switchboard: Switchboard,
    source: int,
    standing: Standing,
    waiting: Waiting,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Waits for the state that was offered to me, and loads it."""
    offer, fd = switchboard.receive_from(source, StateOffer, waiting, meanwhile)
    faults.point("got-state", offer.step)
    standing.accept_state(offer, fd)
