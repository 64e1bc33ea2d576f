"""A rank that is stuck while those on other hosts wait for it: the right one is named, with its line."""

from pathlib import Path

import pytest
from hosts_cluster import HostsCluster

from racimo.spec.run import RunSpec

pytestmark = pytest.mark.e2e

STUCK = """
import ctypes, os
import torch
import racimo

def train(config):
    run = racimo.current_run()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
    batches = racimo.Batches(data, global_batch_size=8, seed=0)
    for step in run.steps(model, optimizer, batches, until=12):
        for x, y in step:
            if step.number == 6 and os.uname().nodename == "h2":
                ctypes.PyDLL(None).sleep(60)  # in C code, with the interpreter's lock
            step.backward((model(x) - y).square().mean())
        step.apply()
"""


def test_a_rank_stuck_in_c_code_is_named_with_its_line_and_with_those_that_wait_on_other_hosts(
    cluster: HostsCluster, tmp_path: Path
) -> None:
    """pytorch#118369, nccl#1324: a hang, and nobody can tell which rank, node or call."""
    (tmp_path / "stuck.py").write_text(STUCK)
    run = cluster.submit(RunSpec(train="stuck.py:train", workers=3, hang_after="2s"), tmp_path)

    view = cluster.wait(run, 60)
    assert view.status == "failed" and view.failure is not None, cluster.story(run)
    stuck = next(worker for worker in view.workers if worker.node == cluster.nodes()["h2"].node.id)
    assert (view.failure.code, view.failure.worker) == ("worker-hung", stuck.id), cluster.story(run)
    assert "stuck.py:16 in train" in view.failure.message, view.failure
    others = ", ".join(str(rank) for rank in range(3) if rank != view.failure.rank)
    assert view.failure.message.endswith(f"while ranks {others} wait for it"), view.failure
