"""What a dead worker left behind: processes in its session or with its environment (ray#31451, ray#32725)."""

import os
import select
import signal
from pathlib import Path

from racimo.agent import processes

REAP_WAIT_S = 2.0
"""How long a zygote may take to clean up after a worker before the agent does it itself."""


def end_leftovers(directory: Path, session: int) -> None:
    """SIGKILLs what a dead worker left in its session or with its environment."""
    marker = os.fsencode(directory / "worker.json")
    for _ in range(processes.MAX_KILL_ROUNDS):
        strays = set(processes.pids_of_session(session)) | set(processes.pids_marked(b"RACIMO_WORKER", marker))
        if not strays:
            return
        for pid in strays:
            processes.kill_quietly(pid, signal.SIGKILL)
        for pid in strays:
            _await_end(pid)


def _await_end(pid: int) -> None:
    """Waits (bounded) for a process that was just killed, and reaps it if it is ours."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([pidfd], [], [], REAP_WAIT_S)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        pass  # somebody else's child: its parent reaps it
    finally:
        os.close(pidfd)
