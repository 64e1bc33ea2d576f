"""The control process's own log: short lines on standard error, which is `logs/control.log`, kept below a cap."""

import logging
import os
import sys
from pathlib import Path

MAX_LOG_BYTES = 1_000_000
CHECK_EVERY_LINES = 200


class BoundedHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error; if that is `path` and has grown too long, it becomes `.1` and a new one begins."""

    def __init__(self, path: Path) -> None:
        super().__init__(sys.stderr)
        self._path = path
        self._num_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._num_lines += 1
        if self._num_lines % CHECK_EVERY_LINES == 0:
            rotate_own_output(self._path)
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk must not become an error of its own."""


def rotate_own_output(path: Path, most_bytes: int = MAX_LOG_BYTES) -> None:
    """Moves the log that standard error goes to out of the way once it is longer than `most_bytes`."""
    try:
        own, there = os.fstat(2), path.stat()
        if (own.st_dev, own.st_ino) != (there.st_dev, there.st_ino) or own.st_size <= most_bytes:
            return
        path.replace(path.with_name(path.name + ".1"))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError:
        return  # such as a full disk: the old file goes on
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def set_up(path: Path) -> None:
    handler = BoundedHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for name in ("uvicorn.error", "uvicorn", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
