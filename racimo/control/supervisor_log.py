"""What the supervisor writes down, without `logging` and `pathlib`, which would double its size."""

import errno
import os
import time

from racimo.act import guardian

MAX_LOG_BYTES = 1_000_000


def say(sentence: str) -> None:
    """One line in `logs/supervisor.log`, where standard error goes."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}\n"
    try:
        os.write(2, line.encode(errors="replace"))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE, errno.EBADF):
            raise


def last_line(path: str) -> str:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except FileNotFoundError:
        return ""
    return lines[-1] if lines else ""


def rotate(path: str) -> None:
    """Keeps a log below its cap: the old one becomes `.1`."""
    try:
        if os.stat(path).st_size > MAX_LOG_BYTES:
            os.replace(path, path + ".1")
    except FileNotFoundError:
        pass


def bound_own_log(root: str) -> None:
    """Starts a new `logs/supervisor.log` if that is where output goes and it has grown too long."""
    path = os.path.join(root, guardian.LOGS_DIR, "supervisor.log")
    try:
        own, there = os.fstat(2), os.stat(path)
    except FileNotFoundError:
        return
    if (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino) and own.st_size > MAX_LOG_BYTES:
        os.replace(path, path + ".1")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
