"""This worker's part in the run: its position, its state, and the way from one step to the next with the others."""

import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from racimo.agent.preload import preload_beside
from racimo.agent.protocol import Ready
from racimo.spec.errors import RacimoError
from racimo.worker.context import WorkerLeaving
from racimo.worker.link import Link
from racimo.worker.train import faults, seeds
from racimo.worker.train.address import Address
from racimo.worker.train.batches import Batch
from racimo.worker.train.compare import compare_before_parting, model_checksum
from racimo.worker.train.exchange import exchange
from racimo.worker.train.guards import Buffers, Trainable, Updates
from racimo.worker.train.ledger import Ledger
from racimo.worker.train.meeting import Meeting
from racimo.worker.train.mesh import Mesh, Regroup
from racimo.worker.train.messages import Compared, Contribution, Holding, Outcome
from racimo.worker.train.newcomers import Newcomers
from racimo.worker.train.parting import say_goodbye
from racimo.worker.train.position import Plan, Position
from racimo.worker.train.saver import Saver
from racimo.worker.train.settle import missing_leaves, settle, take_state
from racimo.worker.train.shards import Shards
from racimo.worker.train.state import Trained
from racimo.worker.train.switchboard import Switchboard
from racimo.worker.train.telemetry import Telemetry
from racimo.worker.train.trail import Trail
from racimo.worker.train.tree import Tree
from racimo.worker.train.wire import Listener

_left_open: list["Crew"] = []
"""Crews whose loop was left: their connections stay until the process ends, so that peers see how it ends."""


class Crew(Position):
    """See the parts it is made of; `settle.Standing` is what the others see of it."""

    def __init__(
        self,
        *,
        worker: str,
        link: Link,
        listener_path: Path | None,
        node: str,
        trained: Trained,
        plan: Plan,
        telemetry: Telemetry,
        saver: Saver,
    ) -> None:
        super().__init__(trained, plan, telemetry, saver)
        self.worker = worker
        self.link = link
        self.until = plan.until
        self.outcome: Outcome | None = None
        self._buffers = Buffers(trained.model) if plan.exact else None
        self._trainable = Trainable(trained.model)
        self._updates = Updates(trained.model, trained.optimizers)
        self._check_every = plan.check_every
        self._ledger = Ledger(self._store, [name for name, _ in self._named], plan.exact)
        listener = Listener(listener_path, self._store.layout) if listener_path is not None else None
        self._listener = listener
        self._switchboard = Switchboard(worker, self._store.arena, link, listener)
        self._meeting = Meeting(self._switchboard, self._store.arena, self._store.layout, self._store.num_slots, node)
        self._shards = Shards(self, self._switchboard, plan.until)
        self._tree: Tree | None = None
        self._agreed: list[tuple[Holding, ...]] | None = None
        self._tokens: float | None = None
        self._last_seat = (-1, 0)
        self._trail = Trail(self._switchboard, self._store)
        self._trails = False
        self._given: Outcome | None = None
        """The outcome of the next step, whose gradient I have already: it is replayed."""
        self._donor: int | None = None
        self._newcomers = Newcomers(self._switchboard)
        self._saying = threading.Lock()
        self._address = Address("")
        self._holds = False
        self._left = False
        self._outside: seeds.State | None = None
        self._compared_in: tuple[int, tuple[int, ...]] = (0, ())

    # The loop over steps

    def enter(self) -> None:
        self._outside = seeds.capture()
        self._updates.open()
        if not self.link.expects_address:  # else others would be told of me twice
            self._be_ready(Address(str(self._listener.path) if self._listener is not None else ""))
        self.link.on_reachable(lambda reachable: self._meeting.open_to_others(reachable, self._be_ready))
        self._telemetry.phase("wait")
        preload_beside()

    def _be_ready(self, address: Address | None = None, holds: bool = False) -> None:
        """Says that I am, or what is new about it. In whatever thread."""
        with self._saying:
            self._address = address or self._address
            self._holds = holds or self._holds
            here, shards = str(self._address), self.identity.micro_shards
            self.link.ready(Ready(address=here, micro_shards=shards, numerics=self.numerics, holds=self._holds))

    def boundary(self) -> bool:
        """Between two steps, where the state is that of exactly `step` commits. False if there is no further step."""
        if self.fresh or self._trails:
            self._come_along()
        self._give_again()
        if self._keeper is not None:
            self._keeper.boundary(self.step, self.trained.capture, self.step >= self.until)
        if self._pauses_here:
            self._part()
            self._switchboard.abandon()
            raise WorkerLeaving("paused")
        if self.step >= self.until:
            self._part()
            return False
        if self._saved_here and (self._leads or (self._seconds and not self._saver.busy)):
            self._telemetry.phase("checkpoint")
            self._saver.save(self.step, self.identity, self.trained)
            if self.seat[1] == 1 or not self._check_every:
                self._saver.start()
        seeds.seed_all(seeds.derive("step", self.batches.seed, self.step))
        self._telemetry.phase("compute")  # whatever the user does from here on, it waits for nobody
        return True

    def _come_along(self) -> None:
        """Until I am one of the active members, or have the gradient of the next step to replay."""
        # Those whom I follow end their step before they go on with others, and give me what it brings.
        self._switchboard.patient = True
        while True:
            try:
                if not self._together:
                    # I may be the furthest of all that live: then what I have stored comes first.
                    orphaned = not self.fresh and self._trail.orphaned()
                    if orphaned and self._trail.backlog.whole(self.step + 1):
                        self._given = self._trail.backlog.take(self.step + 1)
                        return
                    self._agreed = self._settle()
                    if self._agreed is None:
                        self._given = self.last
                        return
                mesh = self._switchboard.mesh
                assert mesh is not None
                if not mesh.trails:
                    self._trail.end()
                    self._trails = False
                    return
                self._agreed = None
                if self.fresh:
                    self._take_snapshot(mesh)
                    continue
                if self._pauses_here or self.step >= self.until:
                    return
                self._given = self._trail.next(mesh, self.step, self._wait_for)
                if self._given is not None:
                    return
                self._donor = self._trail.ask_again(mesh, self.step)
                self.fresh = True
            except Regroup:
                self._switchboard.abandon()

    def _take_snapshot(self, mesh: Mesh) -> None:
        source = self._donor if self._donor is not None else mesh.nearest(mesh.rank, mesh.active)
        take_state(self._switchboard, source, self, self._wait_for, lambda: self._trail.sort_in(mesh))
        self._trail.backlog.forget_until(self.step)
        if self.last is not None:
            mesh.enter(self.last)  # if all wait for me

    def _give_again(self) -> None:
        mesh = self._switchboard.mesh if self._together else None
        self._newcomers.serve(mesh, self, ends=self._pauses_here or self.step >= self.until)

    @property
    def _pauses_here(self) -> bool:
        return self.last is not None and self.last.pause and self.last.step == self.step

    def leave(self, finished: bool) -> None:
        """The loop is over. If it was left early, peers are told, and see the rest by how this process ends; a trial
        has none, and gives all back. A second call changes nothing."""
        if self._left:
            return
        self._left, self._last_seat = True, self.seat
        finished = finished or self._keeper is not None
        if finished:
            self._switchboard.close()
            self._telemetry.phase("done")
        else:
            if not self.fresh:  # who never trained along only ends, and nobody counts on it
                self._switchboard.say_left(self.step)
            _left_open.append(self)
        self._updates.close()
        self._saver.wait()
        self._shards.close()
        self._ledger.close()
        self._telemetry.close()
        if self._outside is not None:
            seeds.restore(self._outside)
        if self._keeper is not None:
            self._keeper.end()
        if finished:
            if self._listener is not None:
                self._listener.close()
            self._store.close()

    @property
    def seat(self) -> tuple[int, int]:
        """(rank, number of workers) in the newest generation this worker has stood in; (-1, 0) before the first."""
        mesh = self._switchboard.mesh
        if mesh is not None:
            self._last_seat = (mesh.rank, mesh.size)
        return self._last_seat

    @property
    def _leads(self) -> bool:
        mesh = self._switchboard.mesh
        return mesh is not None and mesh.rank == mesh.lead

    @property
    def _seconds(self) -> bool:
        """Whether I keep a second copy of each checkpoint, on another machine than the lead."""
        mesh = self._switchboard.mesh
        return mesh is not None and self._saver.keeps_two and mesh.rank == mesh.second

    def _part(self) -> None:
        """Nobody goes while another could still need it: all have committed everything, or are gone."""
        self._switchboard.patient = False
        while True:
            try:
                if not self._together:
                    self._settle()
                mesh = self._switchboard.mesh
                assert mesh is not None
                if self._check_every and mesh.size > 1:
                    compare_before_parting(
                        self._switchboard,
                        mesh,
                        Compared(step=self.step, checksum=self._checksum()),
                        self._wait_for,
                        self._give_again,
                    )
                if self._leads or self._seconds:
                    self._telemetry.phase("checkpoint")
                    self._saver.save_last(self.step, self.identity, self.trained, needed=self._leads)
                say_goodbye(self._switchboard, mesh, self.step, self._wait_for, self._give_again)
                return
            except Regroup:
                self._switchboard.abandon()

    # One step

    def micro_shards(self) -> Iterator[Batch]:
        """Yields what falls to this worker until the step is whole; then the gradient is in place."""
        self._tree = self._shards.tree(self.step)
        self._trainable.refuse_change()
        self._ledger.begin(self._tree)
        self._tokens = None
        given, self._given = self._given, None
        todo = self._first_share() if given is None else []
        self.untouched = False
        while True:
            if given is not None:
                self.outcome = self.last = given
                break
            if todo is None:
                agreed = self._settle()
                if agreed is None:
                    self._saver.start()  # who gave me the gradient has seen the checksums of all
                    self.outcome = self.last
                    break
                assert self._switchboard.mesh is not None
                todo = missing_leaves(self._tree, self._switchboard.mesh, self._ledger, agreed)
            self._switchboard.patient = True
            while todo and not self._switchboard.outdated:
                yield self._load(todo.pop(0))
                if self._buffers is not None:
                    self._buffers.refuse_change()
            if self._switchboard.outdated:
                todo = None
                continue
            try:
                self.outcome = self.last = self._exchange()
                break
            except Regroup:
                self._switchboard.abandon()
                todo = None
        self._switchboard.patient = False
        assert self.outcome is not None
        self._ledger.end()
        self._store.hand_out(self.outcome.used)
        seeds.seed_all(seeds.derive("apply", self.batches.seed, self.step))
        self._telemetry.phase("apply")

    def _first_share(self) -> list[int] | None:
        agreed, self._agreed = self._agreed, None
        mesh = self._switchboard.mesh
        if mesh is None or not self._together:
            return None
        assert self._tree is not None
        if agreed is not None:
            return missing_leaves(self._tree, mesh, self._ledger, agreed)
        return self._shards.share(self.step, mesh)

    def _load(self, leaf: int) -> Batch:
        self._telemetry.phase("compute")
        batch = self._shards.load(self.step, leaf)
        if self._buffers is not None:
            self._buffers.remember()
        return batch

    def backward(self, batch: Batch, loss: torch.Tensor, weight: float | None) -> None:
        counted = batch.weight if weight is None else weight
        if not counted >= 0.0:
            raise RacimoError("steps-misused", f"the weight of a loss is a count, not {counted}")
        if weight is not None:
            self._tokens = (self._tokens or 0.0) + weight
        self._ledger.backward(batch.index, loss, counted, counted / self._shards.nominal_weight, len(batch.indices))

    def _exchange(self) -> Outcome:
        self._telemetry.phase("exchange", generation=self._switchboard.mesh.number if self._switchboard.mesh else 0)
        mesh = self._switchboard.mesh
        assert self._tree is not None and mesh is not None
        if mesh.trailing:
            self._switchboard.take_in()  # who is the only active one waits for nobody
        every = self._check_every
        # In a new generation somebody may have joined, whose state is to be the others'.
        checked = every and (
            self.step % every == 0 or self._saved_here or (mesh.number, mesh.active) != self._compared_in
        )
        mine = Contribution(
            step=self.step,
            holdings=self._ledger.holdings(),
            active=mesh.active,
            pause=self.link.pause_requested,
            save=self._leads and self._saver.due(self.step + 1),
            checksum=self._checksum() if checked and len(mesh.active) > 1 else None,
            enters=self._newcomers.to_enter(mesh, self.step) if self._leads else {},
            left_out=dict(mesh.left_out),
        )
        compared_in = mesh.number, mesh.active
        outcome = exchange(
            self._switchboard, self._store, self._tree, self._shards.nominal_weight, mine, self._wait_for
        )
        self._compared_in = compared_in
        self._saver.start()
        return outcome

    @property
    def _saved_here(self) -> bool:
        """The state at this boundary goes into a checkpoint. Agreed with the step before, so all know."""
        return self.last is not None and self.last.save and self.last.step == self.step

    def _checksum(self) -> int:
        return model_checksum(self.trained.model, self._buffers is not None)

    def apply(self, outcome: Outcome) -> None:
        faults.point("applying", self.step)
        self._updates.apply()
        self._store.drop_gradients()
        self._ledger.keep(())
        self.step += 1
        self.given = False
        faults.point("applied", self.step)
        if not self._holds and not self._trails:
            self._be_ready(holds=True)
        self._telemetry.committed(outcome, outcome.weight if self._tokens is not None else None)

    # Together

    @property
    def _together(self) -> bool:
        mesh = self._switchboard.mesh
        return mesh is not None and mesh.settled and not self._switchboard.outdated

    def _settle(self) -> list[tuple[Holding, ...]] | None:
        """Stands with all members of the newest generation; None if first a given gradient has to be applied."""
        while True:
            mesh = self._switchboard.mesh
            try:
                if mesh is None or self._switchboard.outdated:
                    self._telemetry.phase("wait")
                    mesh = self._meeting.next_mesh(self._wait_for)
                self._switchboard.refuse_leavers(self.step - 1 if self.step >= self.until else self.step)
                self._donor = None
                agreed = settle(self._switchboard, mesh, self._store, self._ledger, self, self._wait_for)
                if mesh.trails:
                    self._trails = True
                    self._trail.begin(mesh, -1 if self.fresh else self.step)
                return agreed
            except Regroup:
                self._switchboard.abandon()

    def _wait_for(self, indices: tuple[int, ...]) -> None:
        mesh = self._switchboard.mesh
        self._telemetry.phase(
            "exchange" if mesh is not None and mesh.settled and not mesh.trails else "wait",
            waits_for=indices,
            unreachable=self._switchboard.unreachable,
            generation=mesh.number if mesh is not None else None,
        )

    @property
    def reaches(self) -> int:
        return self._trail.backlog.reach(self.step) if self._trails and not self.fresh else -1
