"""A small training run one worker of which is slow now and then, or stuck in C code: `config` says when.

`slow_every`: in each such step the last rank sleeps `slow_s` between forward and backward pass. `stuck_at`: in that
step the last rank calls a C function that keeps the interpreter's lock for `stuck_s`.
"""

import ctypes
import time
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import racimo


def train(config: dict[str, Any]) -> None:
    run = racimo.current_run()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(480, 16, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    batches = racimo.Batches(dataset, global_batch_size=48, seed=0, micro_shards=12)
    for step in run.steps(model, optimizer, batches, until=config["steps"]):
        last = run.num_workers > 1 and run.rank == run.num_workers - 1
        if last and config.get("slow_every") and step.number % config["slow_every"] == 0:
            time.sleep(config["slow_s"])
        if last and step.number == config.get("stuck_at"):
            ctypes.PyDLL(None).sleep(int(config["stuck_s"]))
        for batch in step:
            time.sleep(config.get("pause_s", 0.01))
            step.backward(cross_entropy(model(batch.x), batch.y))
        step.apply()
