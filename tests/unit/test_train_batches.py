"""Which samples a step trains on depends on the seed and the step alone."""

import itertools

import numpy
import pytest
import torch

from racimo.spec.errors import RacimoError
from racimo.worker.train.batches import Batch, Batches, Feeder, Key


def numbers(size: int) -> list[int]:
    return list(range(size))


def of_epoch(batches: Batches, epoch: int) -> list[int]:
    first = epoch * batches.steps_per_epoch
    return list(itertools.chain(*(batches.indices(first + i).tolist() for i in range(batches.steps_per_epoch))))


@pytest.mark.parametrize("size", [32, 33, 63, 64, 100])
def test_every_sample_comes_once_per_epoch_in_an_order_of_its_own(size: int) -> None:
    batches = Batches(numbers(size), global_batch_size=32)
    orders = [of_epoch(batches, epoch) for epoch in range(3)]
    assert all(sorted(order) == numbers(size) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_the_order_of_a_seed_never_changes() -> None:
    """Written down: a resumed run must meet the order that it began with, whatever numpy has become meanwhile."""
    assert Batches(numbers(8), global_batch_size=8, seed=0).indices(0).tolist() == [2, 7, 6, 3, 5, 4, 0, 1]


def test_a_step_in_a_later_epoch_is_found_without_the_steps_before() -> None:
    """accelerate#2016: resuming in a later epoch replayed the first epoch's order."""
    fresh = Batches(numbers(100), global_batch_size=32)
    used = Batches(numbers(100), global_batch_size=32)
    for step in range(9):
        used.indices(step)
    assert numpy.array_equal(fresh.indices(9), used.indices(9))
    assert fresh.epoch_of(9) == 2


@pytest.mark.parametrize("num_shards", [1, 3, 8])
def test_micro_shards_cut_a_batch_without_gap_or_overlap(num_shards: int) -> None:
    batches = Batches(numbers(100), global_batch_size=32, shuffle=False)
    for step in range(4):
        shards = [batches.shard_indices(step, shard, num_shards) for shard in range(num_shards)]
        assert list(itertools.chain(*shards)) == batches.indices(step).tolist()
        assert [shard for shard in range(num_shards) if shards[shard]] == batches.present(step, num_shards)


def test_the_last_batch_of_an_epoch_is_smaller_or_dropped() -> None:
    assert [len(Batches(numbers(70), global_batch_size=32).indices(step)) for step in range(4)] == [32, 32, 6, 32]
    dropping = Batches(numbers(70), global_batch_size=32, drop_last=True)
    assert [len(dropping.indices(step)) for step in range(4)] == [32, 32, 32, 32]


def test_a_dataset_shorter_than_one_batch_is_refused_with_numbers() -> None:
    with pytest.raises(RacimoError, match=r"32 samples, and the dataset has 10") as refused:
        Batches(numbers(10), global_batch_size=32)
    assert refused.value.code == "dataset-too-small"


@pytest.mark.parametrize("bad", [{"global_batch_size": 0}, {"global_batch_size": 4, "micro_shards": 0}])
def test_counts_start_at_one(bad: dict[str, int]) -> None:
    with pytest.raises(RacimoError, match="from 1 up"):
        Batches(numbers(10), **bad)


def test_an_iterable_dataset_is_refused() -> None:
    with pytest.raises(RacimoError, match="map-style"):
        Batches(iter([1, 2]), global_batch_size=1)


class Noisy:
    """Items with random augmentation."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(()) + float(numpy.random.rand()) + index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_augmentation_does_not_depend_on_where_items_are_fetched(num_workers: int) -> None:
    reference = Batches(Noisy(), global_batch_size=16)
    batches = Batches(Noisy(), global_batch_size=16, num_workers=num_workers)

    def plan(step: int):  # type: ignore[no-untyped-def]
        for number in range(step, 8):
            for shard in (0, 1):
                yield Key(number, shard, batches.shard_indices(number, shard, 4))

    feeder = Feeder(batches, plan)
    asked = [(0, 0), (0, 1), (0, 3), (1, 0), (1, 1), (3, 0), (3, 1), (4, 0)]
    for step, shard in asked:
        key = Key(step, shard, batches.shard_indices(step, shard, 4))
        torch.manual_seed(99)
        assert torch.equal(feeder.get(key), reference.fetch(key)), key
    feeder.close()


def test_a_batch_is_read_in_any_of_three_ways() -> None:
    batch = Batch(3, [7, 8], [torch.ones(2), torch.zeros(2)])
    x, y = batch
    assert x is batch.x is batch[0]
    assert y is batch.y is batch.data[1]
    assert (len(batch), batch.weight, batch.index, batch.indices) == (2, 2.0, 3, (7, 8))


@pytest.mark.parametrize("size", [8.0, "8", 0, None])
def test_a_batch_size_that_is_no_count_is_refused(size: object) -> None:
    with pytest.raises(RacimoError, match="global_batch_size is a count") as raised:
        Batches(numbers(8), global_batch_size=size)  # type: ignore[arg-type]
    assert raised.value.code == "steps-misused"


def test_a_batch_size_may_come_from_numpy() -> None:
    assert Batches(numbers(8), global_batch_size=numpy.int64(4)).steps_per_epoch == 2  # type: ignore[arg-type]
