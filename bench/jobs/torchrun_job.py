"""The benchmark's workload under torchrun, as its tutorial on fault tolerance has it: DDP, a snapshot, restarts.

    torchrun ... torchrun_job.py OUT WORKLOAD_JSON [TIMEOUT_S]

TIMEOUT_S: how long a collective may take. torch's own 30 minutes mean that a host which is cut off (no reset comes)
stops everybody for half an hour.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_loop import train_loop
from torch.nn.parallel import DistributedDataParallel
from workload import Workload


def main(out: Path, workload: Workload, timeout_s: float = 1_800.0) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    rank = dist.get_rank()
    path = out / "snapshot.pt"

    def save(step: int, parts: dict[str, Any]) -> None:
        if rank == 0:
            torch.save(parts, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)

    def wrap(model: torch.nn.Module) -> Any:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    snapshot = torch.load(path) if path.exists() else None
    train_loop(workload, rank, dist.get_world_size(), out, wrap, snapshot, save)
    dist.barrier()  # Gloo aborts a rank that leaves while a peer still works
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Workload(**json.loads(sys.argv[2])), *map(float, sys.argv[3:4]))
