"""What is trained in the benchmarks: one model, one loss, one optimizer for every system under test.

This folder is copied beside `examples/gpt/model.py` and `data.py`, so it imports them by their bare names; it must run
in a peer's environment, which has torch and not Racimo.
"""

import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from model import GPT, GPTConfig
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`micro_shards` is M; a peer with W workers does M / W backward passes per step and worker."""

    steps: int
    global_batch_size: int = 32
    micro_shards: int = 8
    num_layers: int = 5
    num_heads: int = 4
    width: int = 128
    block: int = 64
    dropout: float = 0.1
    ema: bool = True
    learning_rate: float = 3e-3
    seed: int = 0
    checkpoint_every: int = 10
    coherence: str = "exact"


def build(workload: Workload) -> tuple[GPT, torch.optim.Optimizer, Any, AveragedModel | None]:
    """Model, optimizer, schedule and moving average, the same bits for the same workload."""
    torch.manual_seed(workload.seed)
    shape = GPTConfig(
        block=workload.block,
        num_layers=workload.num_layers,
        num_heads=workload.num_heads,
        width=workload.width,
        dropout=workload.dropout,
    )
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=workload.steps)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99)) if workload.ema else None
    return model, optimizer, schedule, average


def loss_of(model: torch.nn.Module, x_BT: torch.Tensor, y_BT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten())


def state_sha256(*things: Any) -> str:
    """SHA-256 over every tensor and number in the `state_dict()` of each thing, in a fixed order."""
    digest = hashlib.sha256()
    for thing in things:
        _feed(digest, thing.state_dict())
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(f"{key}:".encode())
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(digest, item)
    elif isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    else:
        digest.update(f"{value!r};".encode())


class CommitLog:
    """A peer's `steps.jsonl`: one line per applied step, one file per process."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder.joinpath(f"steps-{rank}-{os.getpid()}.jsonl").open("a", buffering=1)

    def add(self, step: int) -> None:
        self._file.write(json.dumps({"step": step, "t": time.monotonic(), "pid": os.getpid()}) + "\n")
