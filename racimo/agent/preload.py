"""What each zygote imports: first what a worker cannot begin without, then, while nobody waits for a fork, the rest.

Names only: this module itself imports nothing heavy. Measured on two cores: torch alone 1.1 s, `torch._dynamo` (which
the first step of any optimizer would import otherwise) and torch's checkpoint package together as much again. None of
it starts a thread, with the OpenMP and BLAS pools at one.
"""

import importlib
import sys
import threading
import weakref
from collections.abc import Iterable

import msgspec

FIRST_MODULES = (
    "numpy",
    "torch",
    "torch.utils.data",
    "torch.distributed",
    "racimo.worker.bootstrap",
    "racimo.worker.train.batches",
    "racimo.worker.train.run",
    "racimo.worker.train.state",
    "racimo.worker.train.steps",
)
LATER_MODULES = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "torch.optim.swa_utils",
    "torch.profiler._cupti_monitor",
    "multiprocessing.pool",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "fsspec",
    "fsspec.implementations.local",
)
OPTIONAL = frozenset({"torch.profiler._cupti_monitor"})
"""Not in every version of torch that we accept."""


class Preload(msgspec.Struct, frozen=True):
    """Modules to import before the first fork, and those that a worker forked before them imports itself."""

    first: tuple[str, ...] = ()
    later: tuple[str, ...] = ()


PRELOADS = {"plain": Preload(), "torch": Preload(FIRST_MODULES, LATER_MODULES)}
"""The shim's modules come with the zygote's own."""


def preload(names: Iterable[str]) -> None:
    """In a zygote. `ImportError` if a module cannot be imported, unless not every version that we accept has it."""
    _import(names)
    _forget_finalizers()


def preload_beside() -> None:
    """In a worker that was forked before its zygote had imported everything: in a thread, so that what would else be
    waited for in the first step is there while the worker waits for others anyway."""
    if any(name not in sys.modules for name in LATER_MODULES if name not in OPTIONAL):
        threading.Thread(target=_import, args=(LATER_MODULES,), name="imports", daemon=True).start()


def _import(names: Iterable[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            if name not in OPTIONAL:
                raise


def _forget_finalizers() -> None:
    """What importing registered for the interpreter's end (torch takes its operator libraries apart: 50 ms) is of no
    use in a worker that ends by `os._exit`; what the user's code registers later still runs."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
