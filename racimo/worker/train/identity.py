"""What makes two workers, or a checkpoint and a worker, the same run."""

from collections.abc import Sequence

import msgspec
import torch

from racimo.worker.train import seeds
from racimo.worker.train.batches import Batches
from racimo.worker.train.messages import Identity


def identity_of(
    named: Sequence[tuple[str, torch.nn.Parameter]], batches: Batches, micro_shards: int, exact: bool
) -> Identity:
    shapes = " ".join(f"{name}:{p.dtype}:{tuple(p.shape)}" for name, p in named)
    return Identity(
        micro_shards=micro_shards,
        seed=batches.seed,
        global_batch_size=batches.global_batch_size,
        dataset_size=len(batches.dataset),
        parameters=f"{len(named)} ({seeds.derive(shapes):016x})",
        coherence="exact" if exact else "fast",
    )


def with_micro_shards(identity: Identity, micro_shards: int) -> Identity:
    return msgspec.structs.replace(identity, micro_shards=micro_shards)


def difference(ours: Identity, theirs: Identity) -> str:
    """The fields in which two identities differ, with both values."""
    return "; ".join(
        f"{name.replace('_', ' ')} {getattr(ours, name)} against {getattr(theirs, name)}"
        for name in Identity.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    )
