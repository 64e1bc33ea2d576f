"""One worker as its agent knows it."""

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Literal

import msgspec

from racimo.agent.processes import ProcessRecord
from racimo.agent.protocol import Progress, Ready, WorkerOrder, WorkerState
from racimo.agent.pulse import Pulse
from racimo.state.nouns import Exit, Failure, parse_worker_id

REPORTED_FILE = "reported"
"""Says that the worker's exit is in the spool; without it the next agent puts it there."""

READY_FILE = "ready.json"
"""What the worker said when it entered `run.steps`; kept so that the next agent knows it for elastic."""


def read_ready(directory: Path) -> Ready | None:
    try:
        return msgspec.json.decode((directory / READY_FILE).read_bytes(), type=Ready)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Entry:
    """A worker from its order to the forgetting of its run. Only the agent's event loop touches it."""

    order: WorkerOrder
    directory: Path
    accepted_s: float = dataclasses.field(default_factory=time.monotonic)
    """When the lease on its devices began, on CLOCK_MONOTONIC."""
    record: ProcessRecord | None = None
    pidfd: int | None = None
    exit: Exit | None = None
    event_number: int | None = None
    """Of its `WorkerExited` in the spool."""
    start_task: asyncio.Task[None] | None = None
    finish_task: asyncio.Task[None] | None = None
    timers: list[asyncio.TimerHandle] = dataclasses.field(default_factory=list)
    reaped: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Its zygote has cleaned up after it, or cannot any more."""
    reaped_exit: Exit | None = None
    doom: Failure | None = None
    """Why the agent itself ended it."""
    killed_by_us: bool = False
    wish: Literal["", "pause", "release"] = ""
    frozen: bool = False
    ready: Ready | None = None
    progress: Progress | None = None
    progress_at_s: float = 0.0
    """When its phase number last changed."""
    noted_phase: int = 0
    """The newest phase number in the worker's own note, where it was ahead of what the worker told."""
    hung_phase: int | None = None
    """The phase number of which a hang was reported."""
    writer: asyncio.StreamWriter | None = None
    followers: set[Pulse] = dataclasses.field(default_factory=set)
    """Beaten when the worker has ended: those who wait for more of its log."""

    @property
    def name(self) -> str:
        return self.order.worker

    @property
    def run(self) -> str:
        return parse_worker_id(self.name)[0]

    @property
    def attempt(self) -> int:
        return parse_worker_id(self.name)[1]

    @property
    def index(self) -> int:
        return parse_worker_id(self.name)[2]

    @property
    def live(self) -> bool:
        return self.exit is None

    @property
    def state(self) -> WorkerState:
        pid = self.record.pid if self.record is not None else None
        return WorkerState(worker=self.name, pid=pid, exited=self.exit is not None)

    def send(self, frame: bytes) -> None:
        """Sends to the worker's own connection, if it has one; it is told again when it connects."""
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(frame)

    def cancel_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()
