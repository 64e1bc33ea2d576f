"""Contents by SHA-256, and their unpacking into an attempt's private folder: all of it or nothing."""

import hashlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from racimo.agent.protocol import FileEntry
from racimo.spec.errors import RacimoError

MAX_STORE_BYTES = 8 * 2**30
"""Beyond this, contents not used for longest go; control sends them again when they are wanted."""
TOUCH_AFTER_S = 60.0
"""A content that a run asks for counts as used; its time is not written anew more often than this."""
DRAFT_PREFIX = ".draft-"


class BlobStore:
    """A folder of files named by their SHA-256. One process uses it: its agent."""

    def __init__(self, root: Path, max_bytes: int = MAX_STORE_BYTES) -> None:
        self._root = root
        self._max_bytes = max_bytes
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for draft in root.glob(".*"):  # of an agent that was killed
            draft.unlink(missing_ok=True)
        self._total_bytes = sum(path.stat().st_size for path in root.iterdir())
        self._counting = threading.Lock()

    def path(self, sha256: str) -> Path:
        return self._root / sha256

    def missing(self, files: Iterable[FileEntry]) -> tuple[str, ...]:
        """Contents of `files` that are not here, each once. Those that are here count as used now."""
        now_s = time.time()
        missing = set()
        for sha256 in {entry.sha256 for entry in files}:
            try:
                if now_s - self.path(sha256).stat().st_mtime > TOUCH_AFTER_S:
                    os.utime(self.path(sha256))
            except FileNotFoundError:
                missing.add(sha256)
        return tuple(sorted(missing))

    def put(self, sha256: str, content: bytes) -> None:
        """Stores one content. `RacimoError` if it is not what its name says; `OSError` if the disk is full."""
        draft = self.draft(sha256)
        try:
            draft.write(content)
            draft.finish()
        finally:
            draft.discard()

    def draft(self, sha256: str) -> "Draft":
        """A content that comes in pieces."""
        return Draft(self, sha256, self._root / f"{DRAFT_PREFIX}{uuid.uuid4().hex}")

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

    def added(self, sha256: str, size_bytes: int) -> None:
        """Counts a new content, and beyond the bound removes those not used for longest; never this one."""
        with self._counting:
            self._total_bytes += size_bytes
            if self._total_bytes <= self._max_bytes:
                return
            stats = [(path, path.stat()) for path in self._root.iterdir() if not path.name.startswith(".")]
            self._total_bytes = sum(stat.st_size for _, stat in stats)
            for path, stat in sorted(stats, key=lambda item: item[1].st_mtime):
                if self._total_bytes <= self._max_bytes:
                    break
                if path.name != sha256:
                    path.unlink(missing_ok=True)
                    self._total_bytes -= stat.st_size


class Draft:
    """A content as it comes in: `write` the pieces in order, then `finish`; `discard` in any case."""

    def __init__(self, store: BlobStore, sha256: str, path: Path) -> None:
        self.path = path
        self.size_bytes = 0
        self._store, self._sha256 = store, sha256
        self._digest = hashlib.sha256()
        self._file = open(path, "xb", buffering=0, opener=_private)  # noqa: SIM115 - closed by `discard`

    def write(self, piece: bytes) -> None:
        """`OSError` if the disk is full. Once discarded, by another thread perhaps, nothing happens."""
        view = memoryview(piece)
        while view:
            try:
                view = view[self._file.write(view) :]
            except ValueError:
                return  # closed
        self._digest.update(piece)
        self.size_bytes += len(piece)

    def finish(self) -> None:
        """Under its name from now on. `RacimoError` if it is not what its name says."""
        found = self._digest.hexdigest()
        if found != self._sha256:
            raise RacimoError("invalid-request", f"a content of SHA-256 {found} was sent as {self._sha256}")
        self._file.close()
        self.path.replace(self._store.path(self._sha256))
        self._store.added(self._sha256, self.size_bytes)

    def discard(self) -> None:
        """Leaves nothing behind; harmless after `finish`."""
        self._file.close()
        self.path.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
