"""Waiting for a file to change without looking at it again and again: Linux's inotify through ctypes."""

import asyncio
import ctypes
import os
import struct
from pathlib import Path

from racimo.agent.pulse import Pulse

IN_MODIFY, IN_CREATE, IN_MOVED_TO = 0x2, 0x100, 0x80
READ_BYTES = 64 * 1024
_EVENT = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class FileWatcher:
    """One inotify instance for the agent. Folders are watched; a change of anything in one wakes its waiters."""

    def __init__(self) -> None:
        self._fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1: " + os.strerror(ctypes.get_errno()))
        self._pulses: dict[int, Pulse] = {}
        self._users: dict[int, int] = {}
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)

    def watch(self, folder: Path) -> "FolderWatch":
        """Starts watching; look at the file *after* this, then wait: no change is missed. `OSError`: too many."""
        number = _libc.inotify_add_watch(self._fd, os.fsencode(folder), IN_MODIFY | IN_CREATE | IN_MOVED_TO)
        if number < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), os.fspath(folder))
        self._users[number] = self._users.get(number, 0) + 1
        return FolderWatch(self, number, self._pulses.setdefault(number, Pulse()))

    def release(self, number: int) -> None:
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number], self._pulses[number]
            # Fails where the folder was deleted, which has ended the watch already.
            _libc.inotify_rm_watch(self._fd, number)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        position = 0
        while position < len(data):
            number, _, _, name_length = _EVENT.unpack_from(data, position)
            position += _EVENT.size + name_length
            if number == -1:  # the queue overflowed: anything may have changed
                for pulse in self._pulses.values():
                    pulse.beat()
            elif number in self._pulses:
                self._pulses[number].beat()


class FolderWatch:
    """A context manager; `wait` returns at the next change in the folder or after the time given."""

    def __init__(self, watcher: FileWatcher, number: int, pulse: Pulse) -> None:
        self._watcher, self._number, self.pulse = watcher, number, pulse

    def __enter__(self) -> "FolderWatch":
        return self

    def __exit__(self, *_: object) -> None:
        self._watcher.release(self._number)
