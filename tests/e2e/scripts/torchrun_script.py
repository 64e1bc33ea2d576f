"""A plain torchrun script: knows nothing of Racimo."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(f"rank {os.environ['RANK']} of {dist.get_world_size()} sees {total.item():.0f}", flush=True)
dist.destroy_process_group()
