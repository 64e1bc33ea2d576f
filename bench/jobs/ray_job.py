"""The benchmark's workload under Ray Train, as its guides on PyTorch and on failures have it.

    python ray_job.py ADDRESS TEMP_DIR

A driver that is connected and has everything imported, so that what is measured begins at `fit()`. It reads one JSON
object a line from stdin (`{"workload", "workers", "out", "name"}`), fits, and answers with one JSON line on stdout.
`workers` is a count, or `[least, most]` for elastic training; `timeout_s` then bounds a collective, and `look_every_s`
is how often Ray Train looks whether it can grow.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch


def train_function(config: dict[str, Any]) -> None:
    sys.path.insert(0, config["code"])
    from ddp_loop import train_loop
    from workload import Workload

    context = ray.train.get_context()
    checkpoint = ray.train.get_checkpoint()
    snapshot = None
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            snapshot = torch.load(Path(folder) / "snapshot.pt")

    def save(step: int, parts: dict[str, Any]) -> None:
        if context.get_world_rank() != 0:
            ray.train.report({"step": step})
            return
        with tempfile.TemporaryDirectory() as folder:
            torch.save(parts, Path(folder) / "snapshot.pt")
            ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))

    train_loop(
        Workload(**config["workload"]),
        context.get_world_rank(),
        context.get_world_size(),
        Path(config["out"]),
        ray.train.torch.prepare_model,
        snapshot,
        save,
    )


def fit(order: dict[str, Any], temp_dir: str) -> None:
    trainer = ray.train.torch.TorchTrainer(
        train_function,
        train_loop_config=order | {"code": str(Path(__file__).parent)},
        scaling_config=scaling(order),
        torch_config=ray.train.torch.TorchConfig(backend="gloo", timeout_s=order.get("timeout_s", 1_800)),
        run_config=ray.train.RunConfig(
            name=order["name"],
            storage_path=f"{temp_dir}/storage",
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


def scaling(order: dict[str, Any]) -> ray.train.ScalingConfig:
    workers = order["workers"]
    if isinstance(workers, int):
        return ray.train.ScalingConfig(num_workers=workers)
    return ray.train.ScalingConfig(
        num_workers=tuple(workers), elastic_resize_monitor_interval_s=order.get("look_every_s", 60.0)
    )


def main(address: str, temp_dir: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever Ray prints goes to stderr: stdout carries answers only
    ray.init(address=address, log_to_driver=False)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        try:
            fit(json.loads(line), temp_dir)
            answers.write(json.dumps({"ok": True}) + "\n")
        except Exception as error:  # noqa: BLE001 - told to the benchmark, which stops
            answers.write(json.dumps({"ok": False, "error": f"{type(error).__name__}: {error}"}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
