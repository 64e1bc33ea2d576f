import os
import tempfile

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch.nn.functional import cross_entropy


def train(config):
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    y = x[:, :4].argmax(dim=1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    start = 1
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(os.path.join(folder, "saved.pt"))
        start = saved["epoch"] + 1
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for epoch in range(start, 10):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            saved = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, os.path.join(folder, "saved.pt"))
            tune.report({"loss": loss.item()}, checkpoint=tune.Checkpoint.from_directory(folder))


if __name__ == "__main__":
    path = os.path.abspath("tuned")
    run_config = tune.RunConfig(name="study", storage_path=path, failure_config=tune.FailureConfig(max_failures=-1))
    if tune.Tuner.can_restore(os.path.join(path, "study")):
        tuner = tune.Tuner.restore(os.path.join(path, "study"), trainable=train, resume_errored=True)
    else:
        tuner = tune.Tuner(
            train,
            param_space={"lr": tune.loguniform(0.001, 1.0)},
            tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=20, scheduler=ASHAScheduler(max_t=9)),
            run_config=run_config,
        )
    tuner.fit()
