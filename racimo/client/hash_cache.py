"""Remembers the hashes of files, so that submitting the same folder again reads only what changed.

A file counts as unchanged if size, modification time and inode are. One modified within the last seconds could change
again without its time moving on, so it is not remembered (git's racy entries).
"""

import hashlib
import os
import time
from pathlib import Path

import msgspec

RACY_NS = 2 * 10**9
MAX_ROOTS = 64

Key = tuple[int, int, int]


class HashCache:
    """The hashes of one root folder, in one file below `folder`; without a `folder` nothing is kept."""

    def __init__(self, folder: Path | None, root: Path) -> None:
        name = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:24]
        self._file = None if folder is None else folder / f"{name}.json"
        self._known = self._load()
        self._used: dict[str, tuple[int, int, int, str]] = {}

    def _load(self) -> dict[str, tuple[int, int, int, str]]:
        if self._file is None:
            return {}
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, tuple[int, int, int, str]])
        except (OSError, msgspec.MsgspecError):
            return {}  # only a cache: hashing again is right, if slower

    def get(self, path: str, size_bytes: int, mtime_ns: int, inode: int) -> str | None:
        entry = self._known.get(path)
        if entry is None or entry[:3] != (size_bytes, mtime_ns, inode):
            return None
        self._used[path] = entry
        return entry[3]

    def put(self, path: str, size_bytes: int, mtime_ns: int, inode: int, sha256: str) -> None:
        if time.time_ns() - mtime_ns > RACY_NS:
            self._used[path] = (size_bytes, mtime_ns, inode, sha256)

    def save(self) -> None:
        """Keeps what was used since this cache was opened; a folder that cannot be written is no reason to fail."""
        if self._file is None or self._used == self._known:
            return
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = self._file.with_suffix(f".{os.getpid()}")
            draft.write_bytes(msgspec.json.encode(self._used))
            draft.replace(self._file)
            self._drop_old(self._file.parent)
        except OSError:
            return

    @staticmethod
    def _drop_old(folder: Path) -> None:
        files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        for file in files[:-MAX_ROOTS]:
            file.unlink(missing_ok=True)
