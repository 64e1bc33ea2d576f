"""What each zygote imports before it forks. Names only: this module itself imports nothing heavy.

Measured on two cores: torch alone 1.8 s, its checkpoint package 0.9 s, `torch._dynamo` (which the first step of any
optimizer would import otherwise) 0.9 s. None of it starts a thread, with the OpenMP and BLAS pools at one.
"""

import importlib
import weakref
from collections.abc import Callable

TORCH_MODULES = (
    "numpy",
    "torch",
    "torch.utils.data",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.optim.swa_utils",
    "torch.profiler._cupti_monitor",
    "multiprocessing.pool",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "fsspec",
    "fsspec.implementations.local",
)
WORKER_MODULES = (
    "racimo.worker.bootstrap",
    "racimo.worker.train.batches",
    "racimo.worker.train.run",
    "racimo.worker.train.state",
    "racimo.worker.train.steps",
)
OPTIONAL = frozenset({"torch.profiler._cupti_monitor"})
"""Not in every version of torch that we accept."""


def preload_plain() -> None:
    """Nothing: the shim's modules came with the zygote's own."""


def preload_torch() -> None:
    """Everything that a training worker would otherwise import after its fork."""
    for name in (*TORCH_MODULES, *WORKER_MODULES):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            if name not in OPTIONAL:
                raise
    _forget_finalizers()


def _forget_finalizers() -> None:
    """What importing registered for the interpreter's end (torch takes its operator libraries apart: 50 ms) is of no
    use in a worker that ends by `os._exit`; what the user's code registers later still runs."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


PRELOADS: dict[str, Callable[[], None]] = {"plain": preload_plain, "torch": preload_torch}
