"""Training functions for the tests, small enough that a hundred of them take a few seconds."""

import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import racimo


class Average:
    """Exponential moving average of the weights."""

    def __init__(self, model: torch.nn.Module, decay: float = 0.9) -> None:
        self.decay = decay
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.decay, self.shadow = state["decay"], state["shadow"]


def data(num_samples: int = 100) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 8, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def everything(config: dict[str, Any]) -> None:
    """Dropout, clipping, a schedule and an average; writes the hash of the final state."""
    run = racimo.current_run()
    torch.manual_seed(config.get("seed", 0))
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.LayerNorm(32), torch.nn.Linear(32, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    state = {"schedule": schedule, "average": Average(model)}
    batches = racimo.Batches(
        config.get("dataset") or data(config.get("num_samples", 100)),
        global_batch_size=config.get("global_batch_size", 32),
        seed=config.get("seed", 0),
        micro_shards=config.get("micro_shards", 8),
        num_workers=config.get("num_workers", 0),
    )
    steps = run.steps(
        model,
        optimizer,
        batches,
        until=config.get("until", 20),
        state=state,
        coherence=config.get("coherence", "exact"),
        check_every=config.get("check_every", 5),
        resume_from=config.get("resume_from", ""),
    )
    for step in steps:
        for batch in step:
            if "pause_s" in config:
                time.sleep(config["pause_s"])
            step.backward(cross_entropy(model(batch.x), batch.y))
        clip_grad_norm_(model.parameters(), 0.5)
        step.apply()
        schedule.step()
        state["average"].update(model)
        run.report(loss=step.loss)
    digest = racimo.hash_state(model, optimizer, state)
    Path(run.output_dir, f"hash-{run.attempt}-{config['index']}.txt").write_text(digest)
