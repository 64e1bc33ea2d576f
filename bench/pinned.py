"""The workloads that the benchmarks share, by number of steps."""

import sys
from dataclasses import replace

from bench.peers import ROOT

for _folder in (ROOT / "examples" / "gpt", ROOT / "bench" / "jobs"):
    sys.path.append(str(_folder))

from data import Text  # noqa: E402 - a job's module: it knows its neighbours by bare names
from workload import Workload  # noqa: E402

__all__ = ["Text", "Workload", "hosts_pinned", "hundred_megabytes", "pinned", "ten_million"]


def pinned(steps: int, seed: int = 0, checkpoint_every: int = 10) -> Workload:
    """About 1 million parameters, M = 8 micro-shards of 4 sequences of 64 bytes; dropout, clipping, schedule, EMA."""
    return Workload(steps=steps, seed=seed, checkpoint_every=checkpoint_every)


def ten_million(steps: int, workers: int, coherence: str = "exact") -> Workload:
    """About 10 million parameters, two micro-shards of 4 sequences of 64 bytes for each worker; no EMA."""
    shape = Workload(steps=steps, num_layers=6, num_heads=6, width=384, ema=False, checkpoint_every=1_000_000)
    return replace(shape, micro_shards=2 * workers, global_batch_size=8 * workers, coherence=coherence)


def hosts_pinned(steps: int, seed: int = 0) -> Workload:
    """As `pinned`, in M = 12 micro-shards, so that 1, 2 and 3 workers of any system do the same work."""
    return replace(pinned(steps, seed), micro_shards=12, global_batch_size=48)


def hundred_megabytes(steps: int) -> Workload:
    """9 million parameters, which with AdamW's two moments are 108 MB of state; no EMA. M = 6 micro-shards of 2
    sequences of 64 bytes: half a second and more a step on two cores and 1 Gbit."""
    shape = Workload(steps=steps, num_layers=5, num_heads=6, width=384, ema=False, checkpoint_every=20)
    return replace(shape, micro_shards=6, global_batch_size=12)
