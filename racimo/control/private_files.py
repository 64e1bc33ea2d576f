"""Files that only their owner reads and that are whole or not there at all."""

import ctypes
import os
import secrets
from pathlib import Path


def sync_file_system(folder: Path) -> None:
    """All that was written on that file system is durable when this returns. `OSError` where it cannot be."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fspath(folder))
    finally:
        os.close(fd)


def write_private(path: Path, content: bytes) -> None:
    """Writes `content` to `path` (0600, folder 0700), durably and atomically. `OSError` leaves the old content."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
