"""A tiny exact training run, quick on any machine."""

import pathlib
import time

import torch
from torch.nn.functional import cross_entropy

import racimo


def train(config):
    run = racimo.current_run()
    torch.manual_seed(config.get("seed", 0))
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.7)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(512, 16, generator=generator)
    labels = (inputs[:, :4].argmax(dim=1)).long()
    dataset = torch.utils.data.TensorDataset(inputs, labels)
    batches = racimo.Batches(dataset, global_batch_size=64, seed=config.get("seed", 0), micro_shards=8)
    for step in run.steps(model, optimizer, batches, until=config["steps"], state={"schedule": schedule}):
        for batch in step:
            step.backward(cross_entropy(model(batch.x), batch.y))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step.apply()
        schedule.step()
        run.report(loss=step.loss)
        time.sleep(config.get("pause_s", 0.0))
    digest = racimo.hash_state(model, optimizer, {"schedule": schedule})
    pathlib.Path(run.output_dir, "hash.txt").write_text(digest)
    print("hash", digest)
