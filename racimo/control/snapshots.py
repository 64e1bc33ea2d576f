"""Files that clients uploaded: contents by SHA-256, sent once, and manifests (which file is which content) by id."""

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Collection
from pathlib import Path, PurePosixPath

import msgspec

from racimo.agent.protocol import FileEntry
from racimo.control.bundle import contents
from racimo.control.private_files import sync_file_system, write_private
from racimo.spec.errors import RacimoError

MAX_FILES = 100_000
MAX_SNAPSHOT_BYTES = 4 * 10**9
MAX_BLOB_BYTES = MAX_SNAPSHOT_BYTES
MIN_COLLECT_AGE_S = 86_400.0

SHA256 = re.compile(r"[0-9a-f]{64}")


def snapshot_id(files: tuple[FileEntry, ...]) -> str:
    """SHA-256 of the manifest in its one canonical spelling: sorted by path, no white space."""
    return hashlib.sha256(canonical_manifest(files)).hexdigest()


def canonical_manifest(files: tuple[FileEntry, ...]) -> bytes:
    return msgspec.json.encode(sorted(files, key=lambda file: file.path), order="deterministic")


def check_manifest(files: tuple[FileEntry, ...]) -> None:
    """`RacimoError` for paths that leave the folder, repeat, or are a file and a folder at once; and for sizes."""
    if len(files) > MAX_FILES:
        raise RacimoError("upload-too-large", f"{len(files)} files, at most {MAX_FILES}", "list some in .racimoignore")
    total_bytes = sum(file.size_bytes for file in files)
    if total_bytes > MAX_SNAPSHOT_BYTES:
        raise RacimoError("upload-too-large", f"{total_bytes} bytes in all, at most {MAX_SNAPSHOT_BYTES}")
    paths: set[str] = set()
    folders: set[str] = set()
    for file in files:
        _check_entry(file)
        if file.path in paths:
            raise RacimoError("invalid-request", f"the path {file.path!r} comes twice")
        paths.add(file.path)
        folders.update(str(parent) for parent in PurePosixPath(file.path).parents)
    both = paths & folders
    if both:
        raise RacimoError("invalid-request", f"{min(both)!r} is a file and a folder at once")


def _check_entry(file: FileEntry) -> None:
    path = PurePosixPath(file.path)
    plain = str(path) == file.path and "\0" not in file.path and "\\" not in file.path
    if not plain or path.is_absolute() or not path.parts or ".." in path.parts:
        raise RacimoError("invalid-request", f"a file's path lies below its folder, unlike {file.path!r}")
    if not SHA256.fullmatch(file.sha256):
        raise RacimoError("invalid-request", f"{file.path}: sha256 is 64 hexadecimal digits, not {file.sha256!r}")
    if file.mode & ~0o777:
        raise RacimoError("invalid-request", f"{file.path}: mode is permission bits, not {file.mode:o}")
    if not 0 <= file.size_bytes <= MAX_BLOB_BYTES:
        raise RacimoError(
            "upload-too-large", f"{file.path} has {file.size_bytes} bytes, a file at most {MAX_BLOB_BYTES}",
            "leave it out with .racimoignore and read it from where it lies",
        )  # fmt: skip


class SnapshotStore:
    """The two folders `blobs/` and `snapshots/`. Methods block on the disk: call those that write from a thread."""

    def __init__(self, blobs: Path, snapshots: Path) -> None:
        self._blobs = blobs
        self._snapshots = snapshots
        for folder in (blobs, snapshots):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for draft in blobs.glob(".draft-*"):  # of uploads that a crash cut off
            draft.unlink(missing_ok=True)

    def put_manifest(self, files: tuple[FileEntry, ...]) -> tuple[str, tuple[str, ...]]:
        """Stores the manifest; its id and the contents still missing."""
        check_manifest(files)
        identity = snapshot_id(files)
        path = self._snapshots / identity
        if not path.exists():
            write_private(path, canonical_manifest(files))
        return identity, self.missing(files)

    def manifest(self, identity: str) -> tuple[FileEntry, ...]:
        """The files of a snapshot, by path. `RacimoError` not-found if nobody sent it."""
        try:
            if not SHA256.fullmatch(identity):
                raise FileNotFoundError
            content = (self._snapshots / identity).read_bytes()
        except FileNotFoundError:
            raise RacimoError("not-found", f"there is no snapshot {identity!r}", "submit the run again") from None
        return msgspec.json.decode(content, type=tuple[FileEntry, ...])

    def missing(self, files: tuple[FileEntry, ...]) -> tuple[str, ...]:
        return tuple(sorted({file.sha256 for file in files if not (self._blobs / file.sha256).exists()}))

    def require_complete(self, identity: str) -> tuple[FileEntry, ...]:
        """The files of a snapshot. `RacimoError` if it is unknown or some content was never sent."""
        files = self.manifest(identity)
        missing = self.missing(files)
        if missing:
            raise RacimoError(
                "invalid-request",
                f"{len(missing)} contents of snapshot {identity[:12]} were not sent, first {missing[0]}",
            )
        return files

    def collect(self, used: Collection[str], min_age_s: float = MIN_COLLECT_AGE_S) -> int:
        """Removes snapshots that no run names, and contents that no snapshot has; how many files went.

        Younger ones than `min_age_s` (seconds since they were stored) stay: a client may be about to submit them."""
        before_s = time.time() - min_age_s
        manifests = [path for path in self._snapshots.iterdir() if SHA256.fullmatch(path.name)]
        doomed = [path for path in manifests if path.name not in used and path.stat().st_mtime < before_s]
        kept = {file.sha256 for path in set(manifests) - set(doomed) for file in self.manifest(path.name)}
        doomed += [
            path
            for path in self._blobs.iterdir()
            if SHA256.fullmatch(path.name) and path.name not in kept and path.stat().st_mtime < before_s
        ]
        for path in doomed:
            path.unlink(missing_ok=True)
        return len(doomed)

    def read_blob(self, sha256: str) -> bytes:
        return self.blob_path(sha256).read_bytes()

    def blob_path(self, sha256: str) -> Path:
        return self._blobs / sha256

    def put_bundle(self, bundle: bytes) -> None:
        """Many small contents, durable together under their names. `RacimoError` invalid-request if one is not what its
        name says; those before it may be stored by then."""
        drafts: list[BlobDraft] = []
        try:
            for sha256, content in contents(bundle):
                drafts.append(self.draft(sha256))
                drafts[-1].write(content)
                drafts[-1].check()
                drafts[-1].close()
            sync_file_system(self._blobs)
            for draft in drafts:
                draft.publish()
        finally:
            for draft in drafts:
                draft.discard()

    def draft(self, sha256: str) -> "BlobDraft":
        if not SHA256.fullmatch(sha256):
            raise RacimoError(
                "invalid-request", f"a content's name is its SHA-256 in 64 hexadecimal digits, not {sha256!r}"
            )
        return BlobDraft(self._blobs, sha256)


class BlobDraft:
    """A content as it comes in: `write` the parts, then `finish`; or `discard`."""

    def __init__(self, folder: Path, sha256: str) -> None:
        self._target = folder / sha256
        self._digest = hashlib.sha256()
        self._sha256 = sha256
        self._size_bytes = 0
        fd, name = tempfile.mkstemp(prefix=".draft-", dir=folder)  # 0600
        self._file = os.fdopen(fd, "wb")
        self._path = Path(name)

    def write(self, part: bytes) -> None:
        self._size_bytes += len(part)
        if self._size_bytes > MAX_BLOB_BYTES:
            raise RacimoError("upload-too-large", f"a file has at most {MAX_BLOB_BYTES} bytes")
        self._digest.update(part)
        self._file.write(part)

    def finish(self) -> None:
        """Durable under its name. `RacimoError` invalid-request if the content is not what the name says."""
        self.check()
        os.fsync(self._file.fileno())
        self.publish()

    def check(self) -> None:
        """All of it is with the kernel, and it is what its name says; else `RacimoError` invalid-request."""
        found = self._digest.hexdigest()
        if found != self._sha256:
            raise RacimoError("invalid-request", f"the content has SHA-256 {found}, not {self._sha256}")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def publish(self) -> None:
        """Under its name, once it is durable."""
        self.close()
        self._path.replace(self._target)

    def discard(self) -> None:
        """Leaves nothing behind; harmless after `finish`."""
        self._file.close()
        self._path.unlink(missing_ok=True)
