"""Racimo joins servers into one AI cluster. This module is what a user imports.

Names are imported when first used, so `import racimo` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from racimo.version import __version__

if TYPE_CHECKING:
    from racimo.client.api import Client, submit
    from racimo.spec.errors import RacimoError
    from racimo.spec.run import RunSpec
    from racimo.worker.train.batches import Batch, Batches
    from racimo.worker.train.run import Run, current_run
    from racimo.worker.train.state import hash_state
    from racimo.worker.train.steps import Step

_HOMES = {
    "Batch": "racimo.worker.train.batches",
    "Batches": "racimo.worker.train.batches",
    "Client": "racimo.client.api",
    "RacimoError": "racimo.spec.errors",
    "Run": "racimo.worker.train.run",
    "RunSpec": "racimo.spec.run",
    "Step": "racimo.worker.train.steps",
    "current_run": "racimo.worker.train.run",
    "hash_state": "racimo.worker.train.state",
    "submit": "racimo.client.api",
}

__all__ = [
    "Batch",
    "Batches",
    "Client",
    "RacimoError",
    "Run",
    "RunSpec",
    "Step",
    "__version__",
    "current_run",
    "hash_state",
    "submit",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'racimo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
