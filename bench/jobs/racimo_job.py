"""The benchmark's workload through `run.steps`: the same model, loss and optimizer as the peers' loop."""

import os
from pathlib import Path
from typing import Any

from data import Text
from faults import Faults
from torch.nn.utils import clip_grad_norm_
from workload import Workload, build, loss_of, state_sha256

import racimo


def train(config: dict[str, Any]) -> None:
    workload = Workload(**config["workload"])
    run = racimo.current_run()
    out = Path(os.environ["RACIMO_OUTPUT_DIR"])
    model, optimizer, schedule, average = build(workload)
    state = {"schedule": schedule} | ({"average": average} if average is not None else {})
    batches = racimo.Batches(
        Text(workload.block),
        global_batch_size=workload.global_batch_size,
        seed=workload.seed,
        micro_shards=workload.micro_shards,
    )
    faults = Faults(config["kills"], run, out)
    loop = run.steps(model, optimizer, batches, until=workload.steps, state=state, coherence=workload.coherence)
    for step in loop:
        faults.begin(step.number)
        for x_BT, y_BT in step:
            faults.computing()
            step.backward(loss_of(model, x_BT, y_BT), weight=y_BT.numel())
            faults.contributed()
        faults.reduced()
        clip_grad_norm_(model.parameters(), 1.0)
        step.apply()
        schedule.step()
        if average is not None:
            average.update_parameters(model)
    if run.rank == 0:
        (out / "hash.txt").write_text(state_sha256(model, optimizer, *state.values()))
