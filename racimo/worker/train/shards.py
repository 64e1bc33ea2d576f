"""The micro-shards of a step that fall to this worker, and their data."""

from collections.abc import Iterator

from racimo.worker.train import faults, seeds
from racimo.worker.train.batches import Batch, Feeder, Key
from racimo.worker.train.mesh import Mesh
from racimo.worker.train.position import Position
from racimo.worker.train.switchboard import Switchboard
from racimo.worker.train.tree import Tree, share


class Shards:
    """Reads ahead for as long as the generation stays as it is. `until`: steps of the run."""

    def __init__(self, position: Position, switchboard: Switchboard, until: int) -> None:
        self._position, self._switchboard, self._until = position, switchboard, until
        self._batches = position.batches
        self._feeder = Feeder(position.batches, self._upcoming)

    @property
    def nominal_weight(self) -> float:
        """Samples of a full micro-shard: losses of full ones are not scaled at all."""
        return self._batches.global_batch_size / self._micro_shards

    def tree(self, step: int) -> Tree:
        return Tree(self._micro_shards, self._batches.present(step, self._micro_shards))

    def share(self, step: int, mesh: Mesh) -> list[int]:
        """The leaves that are mine where nobody holds any yet."""
        if mesh.rank not in mesh.active:
            return []
        present = self._batches.present(step, self._micro_shards)
        return share(present, len(mesh.active))[mesh.active.index(mesh.rank)]

    def load(self, step: int, leaf: int) -> Batch:
        """Its data, with the random numbers seeded for it."""
        indices = self._batches.shard_indices(step, leaf, self._micro_shards)
        data = self._feeder.get(Key(step, leaf, indices))
        seeds.seed_all(seeds.derive("model", self._batches.seed, step, leaf))
        faults.point("computing", step)
        return Batch(leaf, indices, data)

    def close(self) -> None:
        self._feeder.close()

    @property
    def _micro_shards(self) -> int:
        return self._position.identity.micro_shards  # a newcomer takes over the run's

    def _upcoming(self, step: int) -> Iterator[Key]:
        """What this worker will compute from a step on, if nothing changes."""
        mesh = self._switchboard.mesh
        while mesh is not None and step < self._until:
            for leaf in self.share(step, mesh):
                yield Key(step, leaf, self._batches.shard_indices(step, leaf, self._micro_shards))
            step += 1
