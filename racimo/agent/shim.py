"""The process beside a command: forks it, waits for it, ends what it leaves behind and writes its `exit.json`.

Runs in a process forked from the plain zygote, already in a session of its own. It records the command's end even if
zygote and agent are both dead; and the command cannot outlive it (the kernel kills it with its parent).
"""

import os
import signal
import struct
import time
from pathlib import Path
from typing import NoReturn

from racimo.agent.exits import exit_from_status, write_exit
from racimo.agent.launch import Launch
from racimo.agent.processes import (
    kill_children_except,
    oom_kills,
    set_child_subreaper,
    set_parent_death_signal,
)
from racimo.agent.verdict import name_failure
from racimo.state.nouns import Exit, Failure

COMMAND_NOT_FOUND = 127
COMMAND_NOT_EXECUTABLE = 126
_ERRNO = struct.Struct("i")

# A signal to the group is for the command: the shim keeps them blocked.
_FOR_THE_COMMAND = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def main(launch: Launch) -> NoReturn:
    """Runs the command to its end and leaves with the exit recorded."""
    started_s = time.monotonic()
    kills_before = oom_kills()
    directory = Path(launch.directory)
    set_child_subreaper()
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_COMMAND)
    pid, exec_errno = _fork_command(launch)
    _, status = os.waitpid(pid, 0)
    held_s = time.monotonic() - started_s
    if exec_errno:
        exit = _cannot_execute(launch, exec_errno, held_s)
    else:
        exit = exit_from_status(status, held_s)
    kill_children_except(set())
    exit = name_failure(exit, directory, launch.host, oom_kills() - kills_before)
    write_exit(directory, exit, Path(launch.ballast))
    os._exit(0)


def _fork_command(launch: Launch) -> tuple[int, int]:
    """(pid, 0), or (pid, errno) if the command could not be executed."""
    shim = os.getpid()
    read_end, write_end = os.pipe()
    came_early = signal.sigpending()
    pid = os.fork()
    if pid == 0:
        code = COMMAND_NOT_FOUND
        try:
            set_parent_death_signal(signal.SIGKILL)
            if os.getppid() == shim:
                for number in (*_IGNORED_BY_PYTHON, *_FOR_THE_COMMAND):
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_THE_COMMAND)
                os.execvpe(launch.command[0], list(launch.command), launch.environment)
        except OSError as error:
            os.write(write_end, _ERRNO.pack(error.errno or -1))
        finally:
            os._exit(code)
    for number in came_early:
        os.kill(pid, number)
    os.close(write_end)
    answer = os.read(read_end, _ERRNO.size)
    os.close(read_end)
    return pid, _ERRNO.unpack(answer)[0] if answer else 0


def _cannot_execute(launch: Launch, code: int, held_s: float) -> Exit:
    name = launch.command[0]
    missing = code in (2, 20)  # ENOENT, ENOTDIR
    message = f"{launch.host} cannot execute {name!r}: {os.strerror(code)}"
    hint = f"looked in PATH={launch.environment.get('PATH', '')}" if missing and "/" not in name else ""
    os.write(2, f"racimo: {message}\n".encode())
    return Exit(
        outcome="failed",
        code=COMMAND_NOT_FOUND if missing else COMMAND_NOT_EXECUTABLE,
        failure=Failure(
            code="file-missing" if missing else "file-unreadable",
            message=message,
            hint=hint,
            rank=launch.rank,
            worker=launch.worker,
        ),
        held_s=held_s,
    )
