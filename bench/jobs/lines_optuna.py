import os

import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from torch.nn.functional import cross_entropy


def train(trial):
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    y = x[:, :4].argmax(dim=1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    lr = trial.suggest_float("lr", 0.001, 1.0, log=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    start, path = 1, f"tuned/{trial.params}.pt"
    if os.path.exists(path):
        saved = torch.load(path)
        start = saved["epoch"] + 1
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for epoch in range(start, 10):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        saved = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, path + ".new")
        os.replace(path + ".new", path)
        trial.report(loss.item(), epoch)
        if trial.should_prune():
            raise optuna.TrialPruned()
    return loss.item()


def again(study, trial):
    if trial.state == optuna.trial.TrialState.FAIL:
        study.enqueue_trial(trial.params)


if __name__ == "__main__":
    os.makedirs("tuned", exist_ok=True)
    study = optuna.create_study(
        study_name="study",
        storage=JournalStorage(JournalFileBackend("tuned/journal.log")),
        pruner=optuna.pruners.HyperbandPruner(1, 9),
        load_if_exists=True,
    )
    study.optimize(train, n_trials=20, catch=(Exception,), callbacks=[again])
