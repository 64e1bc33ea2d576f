"""Training functions that each do one thing wrong."""

import os
import threading

import torch

import racimo


def _loop(model, batches, until=20, after_step=lambda step: None, **kwargs):
    run = racimo.current_run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in run.steps(model, optimizer, batches, until=until, **kwargs):
        for batch in step:
            step.backward(model(batch.x).square().mean())
        step.apply()
        after_step(step)


def _data(num_samples=64):
    return torch.utils.data.TensorDataset(torch.randn(num_samples, 4), torch.zeros(num_samples))


def short_dataset():
    _loop(torch.nn.Linear(4, 1), racimo.Batches(_data(8), global_batch_size=16))


def two_micro_shards():
    _loop(torch.nn.Linear(4, 1), racimo.Batches(_data(), global_batch_size=16, micro_shards=2))


def batch_norm():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    _loop(model, racimo.Batches(_data(), global_batch_size=16))


def own_collectives():
    torch.distributed.init_process_group("gloo")
    _loop(torch.nn.Linear(4, 1), racimo.Batches(_data(), global_batch_size=16))


def hang():
    def stop_here(step):
        if step.number == 3 and os.environ["RANK"] == "1":
            threading.Event().wait()

    _loop(torch.nn.Linear(4, 1), racimo.Batches(_data(), global_batch_size=16), after_step=stop_here)


class _Leave(Exception):
    pass


def one_leaves():
    def leave(step):
        if step.number == 3 and os.environ["RANK"] == "1":
            raise _Leave

    try:
        _loop(torch.nn.Linear(4, 1), racimo.Batches(_data(), global_batch_size=16), until=500, after_step=leave)
    except _Leave:
        return
