"""`exit.json`: how a worker ended, written exactly once by whoever saw it first (worker, shim, zygote or agent)."""

import contextlib
import errno
import os
from pathlib import Path

import msgspec

from racimo.state.nouns import Exit, Failure

EXIT_FILE = "exit.json"
PID_FILE = "pid.json"
IN_STEPS_FILE = "in-steps"
"""There while a training worker is inside its loop over `run.steps`: who ends then, ended too early."""
BALLAST_FILE = "ballast"
"""Some MB below the node's folder, given up when the disk is full so that exits can still be recorded."""


def link_once(path: Path, content: bytes, ballast: Path | None = None) -> bool:
    """Creates `path` with `content`, whole or not at all; False if it was there already.

    A full disk first gives up the ballast; if that does not help either, the `OSError` comes out.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            temporary.write_bytes(content)
        except OSError as error:
            if error.errno != errno.ENOSPC or ballast is None:
                raise
            ballast.unlink(missing_ok=True)
            temporary.write_bytes(content)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        return True
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def write_exit(directory: Path, exit: Exit, ballast: Path | None = None) -> bool:
    """Records the worker's end; False if another record was first. `OSError` if the disk does not take it."""
    try:
        content = msgspec.json.encode(exit)
    except UnicodeEncodeError:  # an exception's message may hold half a surrogate pair, or a file name's odd byte
        content = msgspec.json.encode(_encodable(exit))
    return link_once(directory / EXIT_FILE, content, ballast)


def _encodable(exit: Exit) -> Exit:
    """`exit` with what UTF-8 cannot hold written as escapes."""
    if exit.failure is None:
        return exit
    texts = {
        name: value.encode(errors="backslashreplace").decode()
        for name, value in msgspec.structs.asdict(exit.failure).items()
        if isinstance(value, str)
    }
    return msgspec.structs.replace(exit, failure=msgspec.structs.replace(exit.failure, **texts))


def read_exit(directory: Path) -> Exit | None:
    """The recorded end, or None while there is none."""
    try:
        return msgspec.json.decode((directory / EXIT_FILE).read_bytes(), type=Exit)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        # Only possible after the machine itself lost power between link and write-back.
        return Exit(outcome="unknown", failure=Failure(code="worker-lost", message=f"its exit record is torn: {error}"))


def exit_from_status(status: int, held_s: float) -> Exit:
    """An `Exit` from the status that `waitpid` gave."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return Exit(outcome="killed", signal=-code, held_s=held_s)
    return Exit(outcome="finished" if code == 0 else "failed", code=code, held_s=held_s)
