"""What each zygote imports before it forks. Names only: this module itself imports nothing heavy."""

import importlib
from collections.abc import Callable

TORCH_MODULES = (
    "numpy",
    "torch",
    "torch.utils.data",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
)
WORKER_MODULES = ("racimo", "racimo.worker.bootstrap", "racimo.worker.context")


def preload_plain() -> None:
    """Nothing: the shim's modules came with the zygote's own."""


def preload_torch() -> None:
    """Everything that a training worker would otherwise import after its fork."""
    for name in (*TORCH_MODULES, *WORKER_MODULES):
        importlib.import_module(name)


PRELOADS: dict[str, Callable[[], None]] = {"plain": preload_plain, "torch": preload_torch}
