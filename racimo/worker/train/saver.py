"""When checkpoints are written, and by whom: the lead, in a thread, from a copy taken at the boundary.
On a machine's own disk they would go with it, so the first worker on another machine writes them too.

The copy is whole before the next step begins, so a checkpoint never holds values of a later optimizer step
(pytorch#144657). It is written once the exchange of that next step has shown that all hold the same model. One is
written at a time; what falls due meanwhile waits for the next boundary.
"""

import errno
import threading
import time

import msgspec

from racimo.agent.protocol import CheckpointSaved
from racimo.spec.errors import RacimoError
from racimo.spec.run import CheckpointSpec
from racimo.worker.link import Link
from racimo.worker.train import faults
from racimo.worker.train.checkpoint import Shelf
from racimo.worker.train.messages import Identity
from racimo.worker.train.state import StateTree, Trained, copy_to_host
from racimo.worker.train.telemetry import say


class Saver:
    """Writes the run's checkpoints. `spec` None: none are written."""

    def __init__(self, spec: CheckpointSpec | None, shelf: Shelf | None, run: str, link: Link) -> None:
        self.shelf = shelf
        self._spec = spec
        self._run = run
        self._link = link
        self._thread: threading.Thread | None = None
        self._taken: tuple[int, Identity, StateTree] | None = None
        self._last_step = 0
        self._last_at_s = time.monotonic()
        self._failed: Exception | None = None

    def claim(self) -> None:
        """No earlier attempt is to write where this one does. That it could not be had is said. On a machine's own disk
        its agent has ended that attempt before it starts this one."""
        assert self.shelf is not None
        if self.keeps_two:
            return
        try:
            self.shelf.fence.claim()
        except Exception as error:  # noqa: BLE001 - a file system at a URL raises what it likes
            say(f"workers of an earlier attempt may still write checkpoints to {self.shelf.root}: {error}")

    def begin_at(self, step: int) -> None:
        """There is a checkpoint of this step, or nothing to save yet."""
        self._last_step = step

    def due(self, step: int) -> bool:
        if self._spec is None or step <= self._last_step or self.busy:
            return False
        if self._spec.every_steps is not None:
            return step // self._spec.every_steps > self._last_step // self._spec.every_steps
        assert self._spec.every_s is not None
        return time.monotonic() - self._last_at_s >= self._spec.every_s

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def keeps_two(self) -> bool:
        """Whether checkpoints lie on the disk of whoever writes them."""
        return self._spec is not None and not self._spec.to

    def save(self, step: int, identity: Identity, trained: Trained) -> None:
        """Copies the state now. `start` then writes it, once all are known to hold the same."""
        self.wait()
        self._taken = step, identity, copy_to_host(trained.capture())
        self._last_step, self._last_at_s = step, time.monotonic()

    def start(self) -> None:
        """Writes what was taken, if anything, in the background; a failure is said, and training goes on."""
        if self._taken is not None:
            self._thread = threading.Thread(target=self._write, args=self._taken, name="racimo-checkpoint", daemon=True)
            self._taken = None
            self._thread.start()

    def save_last(self, step: int, identity: Identity, trained: Trained, needed: bool = True) -> None:
        """Writes the state before returning. Raises `disk-full` or `checkpoint-failed` if it is needed and cannot be
        had."""
        if self._spec is None:
            return
        self.wait()
        if step > self._last_step or self._failed is not None:
            self._last_step = step
            self._write(step, identity, trained.capture())
        if self._failed is not None and needed:
            error = self._failed
            assert self.shelf is not None
            raise _failure(step, self.shelf.root, error)

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, identity: Identity, tree: StateTree) -> None:
        assert self._spec is not None and self.shelf is not None
        faults.point("saving", step)
        try:
            size = self.shelf.save(step, self._run, identity, tree)
            self.shelf.prune(self._spec.keep)
        except Exception as error:  # noqa: BLE001 - a file system at a URL and the user's state raise what they like
            self._failed = error
            say(f"the checkpoint of step {step} could not be written, training goes on: {error}")
            return
        self._failed = None
        self._link.tell(CheckpointSaved(step=step, path=self.shelf.path(step), size_bytes=size))


def _failure(step: int, root: str, error: Exception) -> RacimoError:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    cause = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    hint = (
        f"make room, or set checkpoint.to to another place; look with: df -h {root}"
        if isinstance(error, OSError) and "://" not in root
        else "mend the cause, or set checkpoint.to to another place"
    )
    message = f"the checkpoint of step {step} could not be written to {root}: {cause}"
    return RacimoError("disk-full" if full else "checkpoint-failed", message, hint)


def checkpoint_mismatch(path: str, difference: str) -> RacimoError:
    return RacimoError(
        "checkpoint-mismatch",
        f"the checkpoint {path} is of another run: {difference}",
        "train with the same settings as the checkpoint, or without resume_from",
    )


class Place(msgspec.Struct, frozen=True):
    """Where a run keeps its checkpoints and how often it writes them; `resume_from` names another run's."""

    spec: CheckpointSpec | None
    root: str
    resume_from: str = ""
