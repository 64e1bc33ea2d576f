"""Where this worker stands: how many steps it has committed, and the state it has after them."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from racimo.worker.train.batches import Batches
from racimo.worker.train.buffers import REDUCED_SLOT, Store
from racimo.worker.train.checkpoint import NOTHING, Manifest, Shelf, Torn, load, resume
from racimo.worker.train.identity import difference, identity_of, with_micro_shards
from racimo.worker.train.messages import Identity, Outcome, StateOffer
from racimo.worker.train.numerics import numerics_class
from racimo.worker.train.saver import Place, Saver, checkpoint_mismatch
from racimo.worker.train.state import StateTree, Trained, pack, unpack
from racimo.worker.train.telemetry import Telemetry, say
from racimo.worker.train.tree import warn_of_default

MOST_MICRO_SHARDS_ADOPTED = 64
"""A worker that was told no count of micro-shards takes over the run's, up to this or its own default."""


class Keeps(Protocol):
    """What saves the state of a loop that trains alone, and may end the loop, between two steps."""

    def restore(self, trained: Trained) -> int | None:
        """Loads what was saved and returns its step; None if there is nothing."""

    def boundary(self, step: int, capture: Callable[[], StateTree], last: bool) -> None:
        """The state is that of exactly `step` commits, `last` if no step follows. May raise to leave the loop."""

    def end(self) -> None:
        """The loop is over."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked `run.steps` for."""

    batches: Batches
    until: int
    micro_shards: int
    exact: bool
    check_every: int
    place: Place
    keeper: Keeps | None = None
    """In a trial, where it takes the place of checkpoints."""


class Position:
    """What the others see of this worker when a generation begins (`settle.Standing`)."""

    def __init__(self, trained: Trained, plan: Plan, telemetry: Telemetry, saver: Saver) -> None:
        self.trained = trained
        self.batches = plan.batches
        self.step = 0
        self.fresh = True
        self.untouched = True
        """Nothing was computed yet from the state that I have."""
        self.last: Outcome | None = None
        self.given = False
        """Another one gave me my state, and I have committed nothing since."""
        self._named = [(name, p) for name, p in trained.model.named_parameters() if p.requires_grad]
        self._most_micro_shards = max(plan.micro_shards, MOST_MICRO_SHARDS_ADOPTED)
        self.identity = identity_of(self._named, plan.batches, plan.micro_shards, plan.exact)
        self._store = Store([parameter for _, parameter in self._named], self._most_micro_shards + 1)
        self.numerics = numerics_class(self._named[0][1].device, trained.optimizers)
        self._telemetry = telemetry
        self._saver = saver
        self._place = plan.place
        self._keeper = plan.keeper
        self._newest_here: tuple[int, int] | None = None
        self._torn: set[int] = set()

    @property
    def shelf(self) -> tuple[int, int]:
        """Of what lies at a URL nobody has more than another: then rank 0 looks."""
        shelf = self._saver.shelf
        if shelf is None or shelf.is_url:
            return NOTHING
        if self._newest_here is None:
            self._newest_here = shelf.newest_precedence(say, self._torn)
        return self._newest_here

    def adopt(self, identity: Identity) -> None:
        theirs = identity.micro_shards
        if self.batches.micro_shards is None and theirs <= self._most_micro_shards:
            self.identity = with_micro_shards(self.identity, theirs)

    def restore(self) -> None:
        """The newest checkpoint of the run, else the one it was told to resume from, else the model as it is."""
        self.last, self.given = None, False
        kept = self._keeper.restore(self.trained) if self._keeper is not None else None
        if kept is not None:
            self.step, self.fresh = kept, False
            self._telemetry.resumed(kept)
            say(f"resumes after step {kept}")
            return
        shelf = self._saver.shelf
        found, source = None, "the newest checkpoint"
        if shelf is not None:
            self._saver.claim()
            shelf.sweep()
        if shelf is not None and shelf.is_url:
            found = shelf.newest(say)
        elif shelf is not None and self.shelf != NOTHING:
            found = self._try_shelf(shelf, self.shelf[1])
            if found is None:
                return  # perhaps another has it whole; all declare again
        if found is None and self._place.resume_from:
            found, source = resume(self._place.resume_from, say), self._place.resume_from
        if found is not None:
            self._begin_from(*found, source)
        else:
            if self.batches.micro_shards is None and (warning := warn_of_default(self.identity.micro_shards)):
                say(warning)
            if self._keeper is None and (committed := self._telemetry.committed_before()):
                say(f"starts again at step 0: {committed} steps were committed, but there is no whole checkpoint")
        self.fresh = False

    def _try_shelf(self, shelf: Shelf, step: int) -> tuple[Manifest, StateTree] | None:
        try:
            return load(shelf.path(step))
        except Torn as torn:
            say(f"checkpoint {shelf.path(step)} is torn and not used: {torn} [checkpoint-torn]")
            self._torn.add(step)
            self._newest_here = None
            return None

    def _begin_from(self, manifest: Manifest, tree: StateTree, source: str) -> None:
        self.adopt(manifest.identity)
        if manifest.identity != self.identity:
            path = self._place.resume_from or self._place.root
            raise checkpoint_mismatch(path, difference(self.identity, manifest.identity))
        self.trained.load(tree)
        self.step = manifest.step
        self._saver.begin_at(manifest.step)
        self._telemetry.resumed(self.step)
        say(f"resumes after step {manifest.step}, from {source} (written by {manifest.run})")

    def offer_state(self, with_gradient: bool) -> tuple[StateOffer, int]:
        """`with_gradient`: of the last step, if I hold it. Whoever computes from my state may have to stand in for me
        when another one is still a step behind."""
        arena = self._store.arena
        held = with_gradient and self.step and arena.reduced_step == self.step
        gradient = arena.flats(REDUCED_SLOT) if held else []
        return pack({"trained": self.trained.capture(), "gradient": gradient}, self.step, self.last)

    def accept_state(self, offer: StateOffer, fd: int) -> None:
        given = unpack(offer, fd)
        self.trained.load(given["trained"])
        self.step, self.last, self.given = offer.step, offer.last, True
        self._store.arena.reduced_step = 0
        if given["gradient"]:
            for mine, theirs in zip(self._store.arena.flats(REDUCED_SLOT), given["gradient"], strict=True):
                mine.copy_(theirs)
            self._store.arena.reduced_step = self.step
        self._saver.begin_at(offer.step - 1)
        self._telemetry.resumed(self.step)
        self.fresh = False
