"""Trains a small GPT on however many workers there are, through deaths and changes of size, to the same weights.

racimo train examples/gpt/train.py:train --workers 2..4      # on a cluster
python examples/gpt/train.py                                 # the same code as one process
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from data import Text, decode
from model import GPT, GPTConfig
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import racimo


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What `config:` of the run may set."""

    steps: int = 600
    global_batch_size: int = 16
    micro_shards: int = 8
    """Pieces of a global batch: the same count gives the same weights on any number of workers, up to one each."""
    learning_rate: float = 6e-3
    clip_norm: float = 1.0
    ema: bool = False
    """Keep a moving average of the weights too, and take the sample from it."""
    seed: int = 0
    num_layers: int = 3
    width: int = 128
    block: int = 64
    dropout: float = 0.1
    sample_tokens: int = 400


def train(config: dict[str, Any]) -> None:
    settings = TrainConfig(**config)
    run = racimo.current_run()

    torch.manual_seed(settings.seed)
    shape = GPTConfig(
        block=settings.block, num_layers=settings.num_layers, width=settings.width, dropout=settings.dropout
    )
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    schedule = warm_cosine(optimizer, settings)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99)) if settings.ema else None
    state = {"schedule": schedule} | ({"average": average} if average else {})
    batches = racimo.Batches(
        Text(shape.block),
        global_batch_size=settings.global_batch_size,
        micro_shards=settings.micro_shards,
        seed=settings.seed,
    )

    # Resumes from a checkpoint, heals when a worker dies, takes in workers that join.
    for step in run.steps(model, optimizer, batches, until=settings.steps, state=state):
        for x_BT, y_BT in step:  # this worker's micro-shards of the step's global batch
            scores_BTV = model(x_BT)
            loss = F.cross_entropy(scores_BTV.flatten(0, 1), y_BT.flatten())
            step.backward(loss, weight=y_BT.numel())  # a mean over tokens weighs as much as it has tokens
        # Here .grad holds the gradient of the whole cluster.
        norm = clip_grad_norm_(model.parameters(), settings.clip_norm)
        step.apply()
        schedule.step()
        if average:
            average.update_parameters(model)
        if step.number % 10 == 0:
            run.report(loss=step.loss, gradient_norm=norm.item())

    if run.rank == 0:
        write_results(model, average or model, run.output_dir, settings)


def warm_cosine(optimizer: torch.optim.Optimizer, settings: TrainConfig) -> torch.optim.lr_scheduler.LRScheduler:
    """Up to `learning_rate` within a tenth of the steps, then down along half a cosine."""
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=settings.steps, pct_start=0.1, cycle_momentum=False
    )


def write_results(model: GPT, sampled: torch.nn.Module, folder: Path, settings: TrainConfig) -> None:
    """`sample.txt`: a prompt the model has not seen and how it goes on. `weights.sha256`: the weights' fingerprint."""
    gpt = sampled.module if isinstance(sampled, AveragedModel) else sampled
    prompt_T = Text(settings.block, "sample")[0][0]
    text = decode(gpt.generate(prompt_T, settings.sample_tokens, seed=settings.seed)[len(prompt_T) :])
    folder.joinpath("sample.txt").write_text(f"{decode(prompt_T)}\n---\n{text}\n")
    folder.joinpath("weights.sha256").write_text(weights_sha256(model) + "\n")
    print(f"weights {weights_sha256(model)}")


def weights_sha256(model: torch.nn.Module) -> str:
    """SHA-256 over every parameter and buffer in order of name; one bit of difference in one weight changes it."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    train({})
