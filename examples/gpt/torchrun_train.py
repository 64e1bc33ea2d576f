"""The same training as a plain torchrun script: `DistributedDataParallel`, gradient accumulation, own checkpoints.

Nothing in it knows Racimo. It runs unchanged under either:

    racimo train examples/gpt/torchrun_train.py --workers 2 -- --steps 200
    torchrun --standalone --nproc-per-node 2 examples/gpt/torchrun_train.py --steps 200
"""

import argparse
import contextlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import Text
from model import GPT, GPTConfig
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes per step and worker")
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("RACIMO_OUTPUT_DIR", ".")))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    micro_batch_size = arguments.global_batch_size // (world_size * arguments.accumulate)

    torch.manual_seed(0)
    model = GPT(GPTConfig(num_layers=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, arguments.learning_rate, total_steps=arguments.steps, pct_start=0.1, cycle_momentum=False
    )
    checkpoint = arguments.out / "snapshot.pt"
    first_step = load(checkpoint, model, optimizer, schedule)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)

    sampler = DistributedSampler(text := Text(model.config.block), seed=0, drop_last=True)
    loader = DataLoader(text, batch_size=micro_batch_size, sampler=sampler, drop_last=True)
    steps_per_epoch = len(loader) // arguments.accumulate
    batches = endless(
        loader, sampler, skip=first_step * arguments.accumulate, used=steps_per_epoch * arguments.accumulate
    )

    for step in range(first_step, arguments.steps):
        torch.manual_seed(step * world_size + rank)
        total = torch.zeros(())
        for part in range(arguments.accumulate):
            x_BT, y_BT = next(batches)
            last = part == arguments.accumulate - 1
            with contextlib.nullcontext() if last else parallel.no_sync():
                loss = F.cross_entropy(parallel(x_BT).flatten(0, 1), y_BT.flatten()) / arguments.accumulate
                loss.backward()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        dist.all_reduce(total)
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1} loss {total.item() / world_size:.4f}", flush=True)
        if rank == 0 and (step + 1) % arguments.checkpoint_every == 0:
            save(checkpoint, step + 1, model, optimizer, schedule)
    dist.barrier()  # Gloo aborts a rank that leaves while a peer still works
    dist.destroy_process_group()


def endless(loader: DataLoader[Any], sampler: DistributedSampler[Any], *, skip: int, used: int) -> Any:
    """Batches of epoch after epoch, `used` of each, from the one after the first `skip` on."""
    epoch, skip = divmod(skip, used)
    while True:
        sampler.set_epoch(epoch)
        for index, batch in enumerate(loader):
            if skip <= index < used:
                yield batch
        epoch, skip = epoch + 1, 0


def save(path: Path, step: int, model: GPT, optimizer: Any, schedule: Any) -> None:
    """Writes aside and renames, so that a crash in the middle leaves the older file whole."""
    parts = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    aside = path.with_suffix(".part")
    torch.save(parts | {"schedule": schedule.state_dict()}, aside)
    aside.rename(path)


def load(path: Path, model: GPT, optimizer: Any, schedule: Any) -> int:
    """Steps already done: those of the checkpoint, or 0 where there is none."""
    if not path.exists():
        return 0
    parts = torch.load(path)
    model.load_state_dict(parts["model"])
    optimizer.load_state_dict(parts["optimizer"])
    schedule.load_state_dict(parts["schedule"])
    return int(parts["step"])


if __name__ == "__main__":
    main()
