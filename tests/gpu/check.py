"""One worker on the GPU, then two sharing it, under a tiny agent; then the same two through Gloo and DDP.

Exit code 0 if losses and weights of one and two workers are equal bit for bit, or if there is no device.
`--device cpu` goes the same way without a GPU, to check this script itself.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed
import torch.distributed.checkpoint
import torch.nn.functional as F
from model import GPT, GPTConfig
from tiny_cluster import TinyCluster

import racimo
import racimo.worker.train.run

MICRO_SHARDS = 4
GLOBAL_BATCH = 32
BLOCK = 128
WARM_STEPS = 5
TIMEOUT_S = 120.0
SHAPE = GPTConfig(num_tokens=256, block=BLOCK, num_layers=6, num_heads=6, width=384, dropout=0.1)

Sample = tuple[torch.Tensor, torch.Tensor]


class Text(torch.utils.data.Dataset[Sample]):
    """Blocks of this machine's own Python documentation, as bytes."""

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        content = "".join(topics[name] for name in sorted(topics)).encode()
        self._tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // BLOCK

    def __getitem__(self, index: int) -> Sample:
        start = index * BLOCK
        return self._tokens[start : start + BLOCK], self._tokens[start + 1 : start + 1 + BLOCK]


def build(device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = GPT(SHAPE).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def loss_of(model: torch.nn.Module, x_BT: torch.Tensor, y_BT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten())


def train(config: dict[str, Any]) -> None:
    """The worker's program."""
    device = config["device"]
    run = racimo.current_run()
    model, optimizer = build(device)
    batches = racimo.Batches(Text(), global_batch_size=GLOBAL_BATCH, micro_shards=MICRO_SHARDS)
    losses, times_s = [], []
    for step in run.steps(model, optimizer, batches, until=config["steps"]):
        for x_BT, y_BT in step:
            step.backward(loss_of(model, x_BT.to(device), y_BT.to(device)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step.apply()
        losses.append(step.loss)
        times_s.append(time.monotonic())
    result = {"losses": losses, "times_s": times_s, "hash": racimo.hash_state(model, optimizer)}
    Path(run.output_dir, f"result-{config['index']}.json").write_text(json.dumps(result))


def train_ddp(rank: int, folder: str, device: str, num_steps: int) -> None:
    """The same work as one of two processes under DDP with Gloo."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, optimizer = build(device)
    parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    text = Text()
    batches = racimo.Batches(text, global_batch_size=GLOBAL_BATCH, micro_shards=MICRO_SHARDS)
    mine = range(rank * MICRO_SHARDS // 2, (rank + 1) * MICRO_SHARDS // 2)
    times_s = []
    for step in range(num_steps):
        for shard in mine:
            parallel.require_backward_grad_sync = shard == mine[-1]
            samples = [text[index] for index in batches.shard_indices(step, shard, MICRO_SHARDS)]
            x_BT, y_BT = (torch.stack(part).to(device) for part in zip(*samples, strict=True))
            (loss_of(parallel, x_BT, y_BT) / len(mine)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times_s.append(time.monotonic())
    Path(folder, f"result-{rank}.json").write_text(json.dumps({"times_s": times_s}))
    torch.distributed.destroy_process_group()


def run_workers(num_workers: int, device: str, num_steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="racimo-gpu-") as folder:
        cluster = TinyCluster(Path(folder), train, {"device": device, "steps": num_steps}, most=2)
        try:
            cluster.run(num_workers, TIMEOUT_S)
            assert cluster.outcomes == ["finished"] * num_workers, cluster.story()
            return json.loads((cluster.output_dir / "result-0.json").read_text())  # type: ignore[no-any-return]
        finally:
            cluster.close()


def run_ddp(device: str, num_steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="racimo-gpu-") as folder:
        code = "import sys, check; check.train_ddp(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))"
        words = [sys.executable, "-c", code]
        running = [subprocess.Popen([*words, str(rank), folder, device, str(num_steps)]) for rank in range(2)]
        codes = [process.wait(TIMEOUT_S) for process in running]
        assert codes == [0, 0], f"DDP ended with {codes}"
        return json.loads(Path(folder, "result-0.json").read_text())  # type: ignore[no-any-return]


def steps_per_s(result: dict[str, Any]) -> float:
    times_s = result["times_s"][WARM_STEPS:]
    return (len(times_s) - 1) / (times_s[-1] - times_s[0])


def has_device() -> bool:
    """Asked in another process: this one must not touch CUDA before it forks."""
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if options.device == "cuda" and not has_device():
        print("no CUDA device here: nothing was checked")
        return 0
    one = run_workers(1, options.device, options.steps)
    print(f"one worker: {steps_per_s(one):.2f} steps/s, last loss {one['losses'][-1]:.4f}")
    two = run_workers(2, options.device, options.steps)
    print(f"two workers: {steps_per_s(two):.2f} steps/s, last loss {two['losses'][-1]:.4f}")
    ddp = run_ddp(options.device, options.steps)
    print(f"two workers under DDP with Gloo: {steps_per_s(ddp):.2f} steps/s")
    equal = one["losses"] == two["losses"] and one["hash"] == two["hash"]
    print(f"losses and weights of one and two workers: {'equal, ' + one['hash'] if equal else 'DIFFERENT'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
