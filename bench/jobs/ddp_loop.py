"""The peers' training loop: what both torchrun's and Ray Train's documentation build around DDP."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from data import Text
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler
from workload import CommitLog, Workload, build, loss_of


def train_loop(
    workload: Workload,
    rank: int,
    world_size: int,
    out: Path,
    wrap: Callable[[torch.nn.Module], Any],
    snapshot: dict[str, Any] | None,
    save: Callable[[int, dict[str, Any]], None],
) -> None:
    """Trains from `snapshot` or the start on; every rank calls `save(step, parts)` each `checkpoint_every` steps."""
    model, optimizer, schedule, average = build(workload)
    first_step = 0
    if snapshot is not None:
        first_step = snapshot["step"]
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        schedule.load_state_dict(snapshot["schedule"])
        if average is not None:
            average.load_state_dict(snapshot["average"])
    parallel = wrap(model)
    commits = CommitLog(out, rank)
    accumulate = workload.micro_shards // world_size
    batches = endless(workload, rank, world_size, first_step, accumulate)
    for step in range(first_step, workload.steps):
        torch.manual_seed(step * world_size + rank)
        for part in range(accumulate):
            x_BT, y_BT = next(batches)
            with contextlib.nullcontext() if part == accumulate - 1 else parallel.no_sync():
                (loss_of(parallel, x_BT, y_BT) / accumulate).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        commits.add(step + 1)
        optimizer.zero_grad()
        schedule.step()
        if average is not None:
            average.update_parameters(model)
        if (step + 1) % workload.checkpoint_every == 0:
            parts = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            parts["schedule"] = schedule.state_dict()
            parts["average"] = average.state_dict() if average is not None else None
            save(step + 1, parts)


def endless(workload: Workload, rank: int, world_size: int, first_step: int, accumulate: int) -> Iterator[Any]:
    """This rank's micro-batches from `first_step` on, epoch after epoch."""
    text = Text(workload.block)
    sampler: DistributedSampler[Any] = DistributedSampler(
        text, num_replicas=world_size, rank=rank, seed=workload.seed, drop_last=True
    )
    size = workload.global_batch_size // workload.micro_shards
    loader: DataLoader[Any] = DataLoader(text, batch_size=size, sampler=sampler, drop_last=True)
    used = len(loader) // accumulate * accumulate
    epoch, skip = divmod(first_step * accumulate, used)
    while True:
        sampler.set_epoch(epoch)
        for index, batch in enumerate(loader):
            if skip <= index < used:
                yield batch
        epoch, skip = epoch + 1, 0
