"""Functions of trials, as people write them and as nobody should."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

import racimo


def rounds(config):
    """A sum over random numbers of each round: it tells whether a round was left out or done twice."""
    run = racimo.current_run()
    state = {"sum": 0.0}
    for _ in run.rounds(int(config.get("rounds", 12)), state):
        time.sleep(config.get("round_s", 0.0))
        state["sum"] += float(torch.rand(()))
        run.report(loss=abs(config["x"] - 0.3) + state["sum"])


def steps(config):
    run = racimo.current_run()
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 + 0.1 * config["x"], momentum=0.9)
    data = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), torch.tensor(1.0)) for i in range(64)]
    batches = racimo.Batches(data, global_batch_size=16, micro_shards=4)
    for step in run.steps(model, optimizer, batches, until=int(config.get("rounds", 12))):
        time.sleep(config.get("round_s", 0.0))
        for batch in step:
            step.backward((model(batch.x).squeeze(-1) - batch.y).square().mean())
        step.apply()
        run.report(loss=step.loss)


def number(config):
    return config["x"]


def stubborn(config):
    """Is never left by an exception."""
    while True:
        try:
            racimo.current_run().report(loss=config["x"])
        except BaseException:  # noqa: BLE001
            time.sleep(0.05)


def silent(config):
    if config["x"] > 0.5:
        time.sleep(3600)
    return config["x"]


def from_a_thread(config):
    """The main thread waits for another one, whose reports end the slice."""

    def work():
        for step in range(100):
            racimo.current_run().report(loss=config["x"] + step)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    threading.Event().wait()


def untidy(config):
    """Leaves a child, a folder and settings; says whether it found those of an earlier trial."""
    found = len([1 for key in os.environ if key == "LEFT"]) + (torch.get_default_dtype() != torch.float32)
    found += Path.cwd() != Path(__file__).resolve().parent
    os.environ["LEFT"] = "1"
    torch.set_default_dtype(torch.float64)
    os.chdir("/")
    subprocess.Popen(["sleep", "3600"])
    racimo.current_run().report(pid=float(os.getpid()))
    return found


def exits(config):
    if config["x"] > 0.5:
        sys.exit("this will not do")
    racimo.current_run().report(loss=config["x"])
    sys.exit(0)


def many(config):
    run = racimo.current_run()
    for step in range(int(config["reports"])):
        run.report(step=step, loss=float(step))


def forks(config):
    """Comes back twice."""
    os.fork()
    return config["x"]
