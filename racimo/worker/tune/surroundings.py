"""What one trial must not leave to the next in its process: settings are put back, children ended, memory returned.

Not put back, as nobody can: modules that were imported and changed, threads that go on (each still belongs to its own
trial and cannot report under another), and functions registered to run at the end of the process. A study with `fresh`
has a process for each trial instead (`fresh.py`).
"""

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from racimo.agent.processes import children_of, kill_quietly, resident_bytes
from racimo.worker.train.telemetry import say

END_CHILDREN_S = 1.0
"""A trial's child processes have so long to end after SIGTERM; then SIGKILL."""
TRIM_ABOVE_BYTES = 64 << 20
"""Memory beyond what the process had at first that is worth giving back to the machine after a trial."""
_KEPT_CHILDREN = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
"""Children that Python starts for itself once and goes on using."""
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]


class Surroundings:
    """The process as it is now. `put_back` makes it so again."""

    def __init__(self) -> None:
        self._settings: list[tuple[Setting, Any]] = [(setting, setting[0]()) for setting in _settings()]
        self._environment = dict(os.environ)
        self._path, self._arguments = list(sys.path), list(sys.argv)
        self._streams = sys.stdin, sys.stdout, sys.stderr
        self._filters = list(warnings.filters)
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self._log_handlers = list(logging.root.handlers)
        self._threads = set(threading.enumerate())
        self._children = set(children_of(os.getpid()))
        self._resident_bytes = resident_bytes(os.getpid())
        self._warm = False
        self._libc = ctypes.CDLL(None)

    def put_back(self) -> None:
        """After a trial. What could not be put back is said, not raised: the trial is over."""
        gc.collect()  # a model that hangs in a cycle, and the loaders whose processes end with them
        self._end_children()
        for (read, write), value in self._settings:
            with _said():
                if read() != value:
                    write(value)
        if os.environ != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        sys.path[:], sys.argv[:] = self._path, self._arguments
        sys.stdin, sys.stdout, sys.stderr = self._streams
        if warnings.filters != self._filters:
            warnings.filters[:] = self._filters  # type: ignore[index]
            warnings._filters_mutated()  # type: ignore[attr-defined]
        for handler in [one for one in logging.root.handlers if one not in self._log_handlers]:
            logging.root.removeHandler(handler)
        self._put_signals_back()
        self._name_threads()
        self._return_memory()

    def _put_signals_back(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)

    def _end_children(self) -> None:
        strays = self._strays()
        if not strays:
            return
        for pid in strays:
            kill_quietly(pid, signal.SIGTERM)
        until_s = time.monotonic() + END_CHILDREN_S
        for pid in strays:
            _await_end(pid, until_s)
        multiprocessing.active_children()  # reaps those of its own that it was not asked about
        for pid in self._strays():
            kill_quietly(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # reaped by whoever started it
                os.waitpid(pid, 0)
        say(f"the trial left {len(strays)} child process{'' if len(strays) == 1 else 'es'}, which were ended")

    def _strays(self) -> list[int]:
        return [pid for pid in children_of(os.getpid()) if pid not in self._children and not _is_kept(pid)]

    def _name_threads(self) -> None:
        fresh = [thread for thread in threading.enumerate() if thread not in self._threads and thread.is_alive()]
        if fresh:
            names = ", ".join(sorted(thread.name for thread in fresh)[:3])
            say(f"{len(fresh)} of the trial's threads go on ({names}); `fresh: true` gives each trial its own process")
            self._threads.update(fresh)  # said once each

    def _return_memory(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        if resident_bytes(os.getpid()) > self._resident_bytes + TRIM_ABOVE_BYTES:
            self._libc.malloc_trim(0)
            self._resident_bytes = resident_bytes(os.getpid())
        if not self._warm:
            self._warm = True
            gc.freeze()  # what the first trial imported is looked at no more after each of the others


def limit_device_memory(shares: int) -> None:
    """Where so many processes share the accelerator each gets its part of the memory: one that wants more has an error
    of its own, and takes nothing from its neighbours."""
    if shares > 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1 / shares)


def device_is_broken() -> bool:
    """Whether the accelerator answers every call with an error from now on, as after a failed assertion on it."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        say(f"the device cannot be used in this process any more: {error}")
        return True
    return False


def _settings() -> list[Setting]:
    """How each is read and written."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    settings: list[Setting] = [
        (_folder, os.chdir),
        (_umask, os.umask),
        (sys.getrecursionlimit, sys.setrecursionlimit),
        (sys.getswitchinterval, sys.setswitchinterval),
        (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        (gc.get_threshold, lambda value: gc.set_threshold(*value)),
        (lambda: logging.root.level, logging.root.setLevel),
        (lambda: logging.root.manager.disable, logging.disable),
        (numpy.geterr, lambda value: numpy.seterr(**value)),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_default_device, lambda value: torch.set_default_device(None if value.type == "cpu" else value)),
        (torch.is_grad_enabled, torch._C._set_grad_enabled),
        (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (_determinism, lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])),
    ]
    settings += [_attribute(cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")]
    settings += [_attribute(matmul, "allow_tf32")]
    settings += [_attribute(sys, name) for name in ("excepthook", "unraisablehook")]
    settings += [_attribute(threading, "excepthook")]
    return settings


def _attribute(owner: Any, name: str) -> Setting:
    return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _folder() -> str:
    try:
        return os.fspath(Path.cwd())
    except FileNotFoundError:  # the trial removed the one that it was in
        return ""


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _await_end(pid: int, until_s: float) -> None:
    """Until a child has ended (it is reaped then), or the time is over."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([pidfd], [], [], max(until_s - time.monotonic(), 0.0))
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    finally:
        os.close(pidfd)


def _is_kept(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
    except OSError:
        return True  # gone
    return any(name in command for name in _KEPT_CHILDREN)


@contextlib.contextmanager
def _said() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a library's own setter; the next trial is told what is not as it was
        say(f"a setting of the process could not be put back after the trial: {error!r}")
