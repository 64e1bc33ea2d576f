"""Which samples a step trains on, in which micro-shard, in which order: a pure function of seed and step."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import msgspec
import numpy
import torch
from torch.utils.data import DataLoader, default_collate

from racimo.spec.errors import RacimoError
from racimo.worker.train import seeds

PREFETCH_PER_WORKER = 2


class Batch:
    """One micro-shard: some samples of a step's global batch, collated.

    Unpacks like the collated item (`x, y = batch`); `.x` and `.y` are its first and second part. `weight` is what
    `step.backward` weighs the loss with unless told otherwise: the number of samples.
    """

    def __init__(self, index: int, indices: Sequence[int], data: Any) -> None:
        self.index = index
        self.indices = tuple(indices)
        self.data = data

    @property
    def weight(self) -> float:
        return float(len(self.indices))

    @property
    def x(self) -> Any:
        return self.data[0]

    @property
    def y(self) -> Any:
        return self.data[1]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __len__(self) -> int:
        return len(self.indices)


class Key(msgspec.Struct, frozen=True):
    """A micro-shard of a step (its number from 0) and the dataset indices in it."""

    step: int
    shard: int
    indices: tuple[int, ...]


class Batches:
    """A map-style dataset cut into global batches of `global_batch_size` samples, each cut into micro-shards.

    Every epoch is one permutation (or the dataset's order with `shuffle=False`), and every sample occurs once in it;
    the last batch of an epoch is smaller unless `drop_last`. `micro_shards` (M) is part of the run's identity; the
    default is 8, or, for a run that may have more than four workers, the smallest power of two that gives each of them
    two. `num_workers` processes fetch ahead. Items are fetched and collated under a seed of their own, so random
    augmentation does not depend on where it runs. Raises `RacimoError` `dataset-too-small` or `steps-misused`.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        micro_shards: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            raise RacimoError(
                "steps-misused",
                f"Batches takes a map-style dataset (with __len__ and __getitem__), not a {type(dataset).__name__}",
                "read an iterable dataset into a list, or index it",
            )
        for name, value in (("global_batch_size", global_batch_size), ("micro_shards", micro_shards)):
            optional = name == "micro_shards" and value is None
            if not optional and (not isinstance(value, int | numpy.integer) or value < 1):
                raise RacimoError("steps-misused", f"{name} is a count from 1 up, not {value!r}")
        if len(dataset) < global_batch_size:
            raise RacimoError(
                "dataset-too-small",
                f"one global batch is {global_batch_size} samples, and the dataset has {len(dataset)}",
                f"use global_batch_size={max(len(dataset), 1)} or less",
            )
        self.dataset = dataset
        self.global_batch_size = int(global_batch_size)
        self.seed = seed
        self.shuffle = shuffle
        self.num_workers = num_workers
        self.collate_fn = collate_fn or default_collate
        self.micro_shards = micro_shards
        self.drop_last = drop_last
        self._order: tuple[int, numpy.ndarray[Any, Any]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(len(self.dataset), self.global_batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, of the step with this number, from 0."""
        return step // self.steps_per_epoch

    def indices(self, step: int) -> numpy.ndarray[Any, Any]:
        """The samples of a step's global batch, in order."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.global_batch_size
        return self._permutation(epoch)[start : start + self.global_batch_size]

    def shard_indices(self, step: int, shard: int, num_shards: int) -> tuple[int, ...]:
        """The samples of one micro-shard; none where a short batch leaves it empty."""
        indices = self.indices(step)
        size = len(indices)
        return tuple(indices[size * shard // num_shards : size * (shard + 1) // num_shards].tolist())

    def present(self, step: int, num_shards: int) -> list[int]:
        """The micro-shards of a step that hold samples."""
        size = len(self.indices(step))
        return [s for s in range(num_shards) if size * s // num_shards < size * (s + 1) // num_shards]

    def fetch(self, key: Key) -> Any:
        """Collated data of one micro-shard, under a seed that depends on nothing but what it is."""
        seeds.seed_all(seeds.derive("data", self.seed, key.step, key.shard))
        return self.collate_fn([self.dataset[index] for index in key.indices])

    def _permutation(self, epoch: int) -> numpy.ndarray[Any, Any]:
        if self._order is None or self._order[0] != epoch:
            order = numpy.arange(len(self.dataset))
            if self.shuffle:
                philox = numpy.random.Philox(key=seeds.derive("order", self.seed, epoch))
                # Not Generator.permutation: numpy does not promise its stream between versions.
                order = numpy.argsort(philox.random_raw(len(order)), kind="stable")
            self._order = epoch, order
        return self._order[1]


class _Fetching(torch.utils.data.Dataset[Any]):
    """What a data-loading process sees: keys in, collated micro-shards out."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, key: Key) -> Any:
        return self._batches.fetch(key)


class _Upcoming:
    """The sampler of the loader: micro-shards that this worker will need if nothing changes, for ever."""

    def __init__(self) -> None:
        self.source: Callable[[], Iterable[Key]] = tuple
        self.handed_out: collections.deque[Key] = collections.deque()

    def __iter__(self) -> Iterator[Key]:
        self.handed_out.clear()
        for key in self.source():
            self.handed_out.append(key)
            yield key


class Feeder:
    """Fetches micro-shards, ahead of their time where `num_workers` processes do it.

    `plan(step)` gives the keys of this worker from a step on. What was fetched ahead is used as long as it is what is
    asked for; after a change of workers it is dropped and begun anew.
    """

    def __init__(self, batches: Batches, plan: Callable[[int], Iterable[Key]]) -> None:
        self._batches = batches
        self._plan = plan
        self._upcoming = _Upcoming()
        self._iterator: Iterator[Any] | None = None
        self._loader: DataLoader[Any] | None = None
        if batches.num_workers:
            self._loader = DataLoader(
                _Fetching(batches),
                batch_size=None,
                sampler=self._upcoming,
                num_workers=batches.num_workers,
                persistent_workers=True,
                prefetch_factor=PREFETCH_PER_WORKER,
                worker_init_fn=_begin_data_worker,
            )

    def get(self, key: Key) -> Any:
        if self._loader is None:
            return self._batches.fetch(key)
        queue = self._upcoming.handed_out
        if self._iterator is not None and queue and queue[0] == key:
            queue.popleft()
            return next(self._iterator)
        if next(iter(self._plan(key.step)), None) != key:
            # A dead peer's micro-shard, or the middle of a step: not worth a stream of its own.
            return self._batches.fetch(key)
        self._upcoming.source = lambda: self._plan(key.step)
        self._iterator = iter(self._loader)
        queue.popleft()
        return next(self._iterator)

    def close(self) -> None:
        """Ends the data-loading processes."""
        self._iterator = None
        self._loader = None


def _begin_data_worker(_: int) -> None:
    """A data-loading process ends with the worker, however that ends."""
    import ctypes
    import os
    import signal

    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)
