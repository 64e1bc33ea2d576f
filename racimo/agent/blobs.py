"""Contents by SHA-256, and their unpacking into an attempt's private folder: all of it or nothing."""

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from racimo.agent.protocol import FileEntry
from racimo.spec.errors import RacimoError

MAX_STORE_BYTES = 4 * 2**30
"""Beyond this, contents not used for longest go; control sends them again when they are wanted."""


class BlobStore:
    """A folder of files named by their SHA-256."""

    def __init__(self, root: Path, max_bytes: int = MAX_STORE_BYTES) -> None:
        self._root = root
        self._max_bytes = max_bytes
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, sha256: str) -> Path:
        return self._root / sha256

    def missing(self, files: Iterable[FileEntry]) -> tuple[str, ...]:
        """Contents of `files` that are not here, each once."""
        return tuple(sorted({entry.sha256 for entry in files if not self.path(entry.sha256).exists()}))

    def put(self, sha256: str, content: bytes) -> None:
        """Stores one content. `RacimoError` if it is not what its name says; `OSError` if the disk is full."""
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            raise RacimoError("invalid-request", f"a content of SHA-256 {found} was sent as {sha256}")
        temporary = self._root / f".{uuid.uuid4().hex}"
        try:
            temporary.write_bytes(content)
            temporary.replace(self.path(sha256))
        finally:
            temporary.unlink(missing_ok=True)
        self._evict(kept=sha256)

    def unpack(self, files: Iterable[FileEntry], target: Path) -> None:
        """Makes `target` with all files in it, or leaves nothing. Nothing happens if it is there already.

        `RacimoError` for a path that leads out of the folder, `FileNotFoundError` for a missing content.
        """
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        temporary.mkdir(mode=0o700)
        try:
            for entry in files:
                self._place(entry, temporary)
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _place(self, entry: FileEntry, root: Path) -> None:
        relative = PurePosixPath(entry.path)
        if relative.is_absolute() or ".." in relative.parts or not relative.parts:
            raise RacimoError("invalid-request", f"a file of the snapshot leads out of its folder: {entry.path!r}")
        path = root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        source = self.path(entry.sha256)
        shutil.copyfile(source, path)
        path.chmod((entry.mode & 0o777) | 0o400)
        os.utime(source)

    def _evict(self, kept: str) -> None:
        stats = [(path, path.stat()) for path in self._root.iterdir() if not path.name.startswith(".")]
        excess = sum(stat.st_size for _, stat in stats) - self._max_bytes
        for path, stat in sorted(stats, key=lambda item: item[1].st_mtime):
            if excess <= 0:
                break
            if path.name != kept:
                path.unlink(missing_ok=True)
                excess -= stat.st_size
