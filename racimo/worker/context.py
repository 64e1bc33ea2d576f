"""What a worker knows of itself, and the way to leave at the cluster's request."""

import os
from pathlib import Path
from typing import Literal

import msgspec

from racimo.agent.protocol import WorkerContext

CONTEXT_VARIABLE = "RACIMO_WORKER"


class WorkerLeaving(SystemExit):
    """Ends a training worker whose leaving was asked for: its exit is recorded as `paused` or `released`.

    A `SystemExit`, so that `except Exception` in user code lets it pass; its exit code is 0.
    """

    def __init__(self, outcome: Literal["paused", "released"]) -> None:
        super().__init__(0)
        self.outcome: Literal["paused", "released"] = outcome


def load_context() -> WorkerContext | None:
    """The context from the file that `RACIMO_WORKER` names; None where this process is no worker of a cluster."""
    path = os.environ.get(CONTEXT_VARIABLE)
    if not path:
        return None
    return msgspec.json.decode(Path(path).read_bytes(), type=WorkerContext)
