"""Gives a plain ending its name where the machine's own numbers tell it: out of memory, disk full."""

import os
import signal
from pathlib import Path

import msgspec

from racimo.agent.exits import IN_STEPS_FILE
from racimo.spec.quantity import format_size
from racimo.state.nouns import Exit, Failure

DISK_FULL_BYTES = 4 * 2**20
"""Less free space than this when a worker fails: that is why."""


def free_disk_bytes(path: Path | str) -> int:
    """Bytes that may still be written below `path`."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def refuse_early_end(exit: Exit, directory: Path, worker: str, rank: int) -> Exit:
    """`exit` as a failure if the worker ended with code 0 inside its loop over `run.steps` without a word (`os._exit`):
    nothing of what Python does at an end has run then, and its run is not finished."""
    if exit.outcome != "finished" or not (directory / IN_STEPS_FILE).exists():
        return exit
    message = f"rank {rank} ({worker}) ended with exit code 0 inside its loop over run.steps, before the last step"
    hint = "look for os._exit in the script and in what it calls; a loop is left by break, return or an exception"
    failure = Failure(code="worker-left-early", message=message, hint=hint, rank=rank, worker=worker)
    return msgspec.structs.replace(exit, outcome="failed", failure=failure)


def name_failure(exit: Exit, directory: Path, host: str, num_oom_kills: int) -> Exit:
    """`exit` with a `Failure` if it was the kernel's memory killer (`num_oom_kills` while it ran) or a full disk."""
    if exit.failure is not None or exit.outcome not in ("failed", "killed"):
        return exit
    if exit.signal == signal.SIGKILL and num_oom_kills > 0:
        message = f"killed by {host}'s kernel because its memory ran out ({num_oom_kills} processes killed meanwhile)"
        hint = "ask for less memory per worker, or give the run fewer workers per machine"
        return msgspec.structs.replace(exit, failure=Failure(code="out-of-memory", message=message, hint=hint))
    free = free_disk_bytes(directory)
    if exit.outcome == "failed" and free < DISK_FULL_BYTES:
        message = f"it ended with exit code {exit.code} while only {format_size(free)} were free on the disk of {host}"
        return msgspec.structs.replace(
            exit, failure=Failure(code="disk-full", message=message, hint=f"df -h {directory}")
        )
    return exit
