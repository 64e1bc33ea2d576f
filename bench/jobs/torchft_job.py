"""The benchmark's workload under torchft, as its example `train_ddp.py` has it: one replica group per host.

    torchrun ... torchft_job.py OUT WORKLOAD_JSON ADDRESS REPLICA REPLICAS

A group that comes back takes the state from a live one. Every group has `micro_shards / REPLICAS` micro-batches a step
whoever else is there, so a step of fewer groups is less work: that is how torchft counts steps, and so do we.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from data import Text
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, default_collate
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing.pg_transport import PGTransport
from workload import CommitLog, Workload, build, loss_of


def main(out: Path, workload: Workload, address: str, replica: int, replicas: int) -> None:
    model, adam, schedule, average = build(workload)
    parts = {"model": model, "optimizer": adam, "schedule": schedule} | ({"average": average} if average else {})

    def load_state_dict(state: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(state[name])

    group = ProcessGroupGloo(timeout=timedelta(seconds=5))
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        replica_id=f"group_{replica}",
        timeout=timedelta(seconds=30),
        hostname=address,
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device="cpu"),
    )
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, adam)
    commits = CommitLog(out, replica)
    accumulate = workload.micro_shards // replicas
    text = Text(workload.block)
    while (step := manager.current_step()) < workload.steps:
        batches = micro_batches(workload, text, step, replica, replicas)
        optimizer.zero_grad()
        for part in range(accumulate):
            x_BT, y_BT = next(batches)
            with contextlib.nullcontext() if part == accumulate - 1 else parallel.no_sync():
                (loss_of(parallel, x_BT, y_BT) / accumulate).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if manager.current_step() > step:
            commits.add(manager.current_step())
            schedule.step()
            if average is not None:
                average.update_parameters(model)
    manager.shutdown()


def micro_batches(workload: Workload, text: Text, step: int, replica: int, replicas: int) -> Iterator[Any]:
    """This group's part of the global batch of a step."""
    size = workload.global_batch_size
    per_epoch = len(text) // size
    epoch, position = divmod(step, per_epoch)
    order = torch.randperm(len(text), generator=torch.Generator().manual_seed(workload.seed + epoch))
    mine = order[position * size : (position + 1) * size][replica::replicas]
    samples = [text[index] for index in mine.tolist()]
    yield from DataLoader(samples, batch_size=size // workload.micro_shards, collate_fn=default_collate)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Workload(**json.loads(sys.argv[2])), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
