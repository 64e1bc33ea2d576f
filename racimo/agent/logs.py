"""Workers' logs: reading from an offset, and a cap that punches out the oldest part so that offsets stay valid."""

import ctypes
import errno
import os
from pathlib import Path

from racimo.spec.quantity import format_size

MAX_LOG_BYTES = 64 * 2**20
KEPT_FRACTION = 0.75
"""Of the cap, after old parts were punched out."""
BLOCK_BYTES = 4096
NOTICE_HEAD, NOTICE_TAIL = "[racimo: the oldest ", " of this log were dropped]"
"""The line that stands in a log for what was dropped from it. Whoever shows the log takes it for talk, not output."""
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x1, 0x2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def read_log(path: Path, offset: int, limit: int) -> tuple[int, bytes]:
    """(where it begins, bytes): at most `limit` from `offset` on (negative: from the end).

    It begins later than asked where that was dropped. A log that does not exist yet is empty.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return max(offset, 0), b""
    try:
        size = os.fstat(fd).st_size
        begin = max(size + offset, 0) if offset < 0 else offset
        if begin >= size:
            return begin, b""
        try:
            begin = os.lseek(fd, begin, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return size, b""  # nothing but a hole up to the end
        return begin, os.pread(fd, limit, begin)
    finally:
        os.close(fd)


def cap_logs(directory: Path) -> None:
    """Both logs of a worker, as `enforce_cap`."""
    for name in ("out.log", "err.log"):
        enforce_cap(directory / name)


def enforce_cap(path: Path, max_bytes: int = MAX_LOG_BYTES) -> int:
    """Drops the oldest part of a log that takes more than `max_bytes` on disk, and says so in the log itself.

    Returns the bytes freed. `OSError` where the file system cannot punch holes.
    """
    try:
        stat = path.stat()
    except FileNotFoundError:
        return 0
    if stat.st_blocks * 512 <= max_bytes:
        return 0
    begin = (stat.st_size - int(max_bytes * KEPT_FRACTION)) // BLOCK_BYTES * BLOCK_BYTES
    if begin <= 0:
        return 0
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if _libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, 0, begin) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), os.fspath(path))
        os.pwrite(fd, notice_over(os.pread(fd, BLOCK_BYTES, begin), begin), begin)
    finally:
        os.close(fd)
    return stat.st_blocks * 512 - path.stat().st_blocks * 512


def notice_over(block: bytes, dropped_bytes: int) -> bytes:
    """What replaces the start of the kept part, up to the end of a line, so that no half line is left."""
    notice = f"{NOTICE_HEAD}{format_size(dropped_bytes)}{NOTICE_TAIL}".encode()
    end = block.find(b"\n", len(notice))
    if end < 0:
        end = min(len(notice), len(block) - 1)
    return notice[:end].ljust(end) + b"\n"


def is_notice(line: str) -> bool:
    """Whether a line was put there by `enforce_cap`."""
    return line.startswith(NOTICE_HEAD) and line.rstrip().endswith(NOTICE_TAIL)
