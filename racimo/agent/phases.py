"""A worker's newest phase in a small file that it writes to as to memory.

What a worker says of its phases goes out by a thread, a few times a second. Code in C that keeps the interpreter's lock
stops that thread too: the last phase that was told may then be an exchange that is long over. This note is made in the
moment of the change, so that the agent finds the truth when it looks for who hangs.
"""

import mmap
import os
import struct
from pathlib import Path

PHASE_FILE = "phase"
_NOTE = struct.Struct("<Q24s")
"""The phase's number and its name, as in `Progress`."""


class PhaseNote:
    """The worker's side."""

    def __init__(self, directory: Path) -> None:
        fd = os.open(directory / PHASE_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _NOTE.size)
            self._memory = mmap.mmap(fd, _NOTE.size)
        finally:
            os.close(fd)

    def write(self, number: int, name: str) -> None:
        """Costs well under a microsecond."""
        _NOTE.pack_into(self._memory, 0, number, name.encode())

    def close(self) -> None:
        self._memory.close()


def read_phase(directory: Path) -> tuple[int, str] | None:
    """(number, name) as the worker noted it last; None if it never did."""
    try:
        content = (directory / PHASE_FILE).read_bytes()
    except FileNotFoundError:
        return None
    if len(content) != _NOTE.size:
        return None
    number, name = _NOTE.unpack(content)
    return int(number), name.rstrip(b"\0").decode(errors="replace")
