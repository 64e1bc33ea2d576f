"""Checkpoints that are whole or not there: `torch.distributed.checkpoint` files, and a manifest that vouches for them.

A checkpoint is the folder `step-N`. It is written under another name, flushed, described by `racimo.json` (sizes and
SHA-256 of every file, the run's identity) and then renamed. At a URL, where nothing can be renamed, the manifest is
written last. One whose files disagree with the manifest is torn; it is said so and never chosen.
"""

import errno
import hashlib
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import msgspec

from racimo.spec.errors import RacimoError
from racimo.version import __version__
from racimo.worker.train.fence import Fence
from racimo.worker.train.messages import Identity
from racimo.worker.train.state import STRUCTURE, StateTree, join, split

MANIFEST = "racimo.json"
_STEP = re.compile(r"step-(\d+)")
_CHUNK_BYTES = 2**20
NOTHING = (-1, -1)
"""Less than the precedence of any checkpoint."""

Say = Callable[[str], None]


def _expect_no_process_group() -> None:
    """torch warns at each call of what we do on purpose: one process, no process group.

    Not in a `catch_warnings`, which is not thread-safe. That of another thread may take this filter away again when it
    ends, but not one that was there at its beginning: hence at import too."""
    said = r"torch\.distributed is disabled, unavailable or uninitialized, assuming the intent is to (save|load)"
    warnings.filterwarnings("ignore", message=said, category=UserWarning)


_expect_no_process_group()


class FileRecord(msgspec.Struct, frozen=True):
    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What `racimo.json` says of a checkpoint."""

    step: int
    run: str
    identity: Identity
    files: dict[str, FileRecord]
    attempt: int = 0
    """Of the run, 0 where an earlier version wrote it."""
    version: str = __version__

    @property
    def precedence(self) -> tuple[int, int]:
        """The greater the newer. An exact run has equal bits at equal steps whichever attempt was there; else what a
        given up attempt has written on its own is another history than the newest one's."""
        return (self.attempt if self.identity.coherence != "exact" else 0), self.step


class Torn(Exception):
    """The checkpoint is not what its manifest says, or has none. The text says how."""


class Shelf:
    """The place where a run's checkpoints lie: a folder or an fsspec URL. `attempt`: of whoever writes."""

    def __init__(self, root: str, attempt: int = 0) -> None:
        self.is_url = "://" in root and not root.startswith("file://")
        self.root = root.removeprefix("file://").rstrip("/") if not self.is_url else root.rstrip("/")
        self.fence = Fence(self.root, self.is_url, attempt)

    def path(self, step: int) -> str:
        return f"{self.root}/step-{step}"

    def reach(self) -> None:
        """Raises `checkpoint-failed` unless the place has a form, and at a URL a protocol, that can be used here."""
        with _told(self.root):
            if self.is_url:
                fsspec.core.url_to_fs(self.root)
            else:
                folder = Path(self.root)
                nearest = next(place for place in (folder, *folder.parents, Path()) if place.exists())
                if not nearest.is_dir():
                    raise NotADirectoryError(f"{nearest} is a file")
                if not os.access(nearest, os.W_OK):
                    raise PermissionError(f"{nearest} must not be written to")

    def steps(self) -> list[int]:
        """Steps of which there is something, whole or torn, newest first."""
        names = self._names()
        return sorted((int(match[1]) for name in names if (match := _STEP.fullmatch(name))), reverse=True)

    def _by_precedence(self) -> list[int]:
        """As `steps`, the one to be chosen first. One without a manifest counts as of the newest attempt."""
        manifests = {step: self._peek(step) for step in self.steps()}
        known = {step: manifest.precedence[0] for step, manifest in manifests.items() if manifest is not None}
        newest = max(known.values(), default=0)
        return sorted(manifests, key=lambda step: (known.get(step, newest), step), reverse=True)

    def _peek(self, step: int) -> Manifest | None:
        """What the manifest says, whether true or not; None where there is none."""
        try:
            if not self.is_url:
                return msgspec.json.decode((Path(self.path(step)) / MANIFEST).read_bytes(), type=Manifest)
            fs, path = fsspec.core.url_to_fs(self.path(step))
            return msgspec.json.decode(fs.cat_file(f"{path}/{MANIFEST}"), type=Manifest)
        except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
            return None

    def _names(self) -> list[str]:
        if not self.is_url:
            return [entry.name for entry in Path(self.root).iterdir()] if Path(self.root).is_dir() else []
        fs, path = fsspec.core.url_to_fs(self.root)
        fs.invalidate_cache()
        return [name.rstrip("/").rsplit("/", 1)[-1] for name in fs.ls(path, detail=False)] if fs.exists(path) else []

    def save(self, step: int, run: str, identity: Identity, tree: StateTree) -> int:
        """Writes a whole checkpoint and returns its size in bytes. If it cannot, raises and leaves nothing: `OSError`,
        or whatever the file system at a URL or the pickling of the user's state raises."""
        self._refuse_to_replace_newer(step)
        parent = None if self.is_url else self.root
        if parent is not None:
            Path(parent).mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f"step-{step}.tmp-", dir=parent))
        try:
            manifest = _write(work, step, run, self.fence.attempt, identity, tree)
            self._refuse_to_replace_newer(step)  # writing takes long enough for another attempt to begin
            if self.is_url:
                self._upload(work, step)
            else:
                self._move_into_place(work, step)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return sum(record.size_bytes for record in manifest.files.values())

    def _refuse_to_replace_newer(self, step: int) -> None:
        there = self._peek(step)
        self.fence.check(there.attempt if there is not None else 0)

    def _move_into_place(self, work: Path, step: int) -> None:
        final = Path(self.path(step))
        if final.is_file():
            raise FileExistsError(f"{final} is a file, where the checkpoint's folder would be")
        if final.exists():
            # Of an earlier attempt: the same bits if whole, of no use if torn.
            final.rename(tempfile.mkdtemp(prefix=f"step-{step}.tmp-old-", dir=self.root))
        try:
            work.rename(final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return  # a worker on another machine wrote the same to a file system that both see
        _sync_folder(Path(self.root))
        for stale in Path(self.root).glob(f"step-{step}.tmp-old-*"):
            shutil.rmtree(stale, ignore_errors=True)

    def _upload(self, work: Path, step: int) -> None:
        fs, path = fsspec.core.url_to_fs(self.path(step))
        fs.makedirs(path, exist_ok=True)
        names = sorted((entry.name for entry in work.iterdir()), key=lambda name: name == MANIFEST)
        for name in names:
            if name == MANIFEST:
                self._refuse_to_replace_newer(step)
            fs.put_file(str(work / name), f"{path}/{name}")

    def prune(self, keep: int) -> None:
        """Deletes all but the newest `keep`, and what interrupted writes have left. Raises `Fenced`."""
        self.fence.check()
        for step in self._by_precedence()[keep:]:
            if self.is_url:
                fs, path = fsspec.core.url_to_fs(self.path(step))
                if fs.exists(f"{path}/{MANIFEST}"):
                    fs.rm(f"{path}/{MANIFEST}")
                fs.rm(path, recursive=True)
            elif Path(self.path(step)).is_dir():
                with suppress(FileNotFoundError):  # a worker on another machine was first
                    doomed = Path(self.path(step)).rename(f"{self.path(step)}.tmp-doomed")
                    shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> None:
        """Deletes what interrupted writes left behind. Only while no other worker can be writing."""
        if not self.is_url and Path(self.root).is_dir():
            for stale in Path(self.root).glob("step-*.tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)

    def newest_precedence(self, say: Say, passed_over: Container[int] = ()) -> tuple[int, int]:
        """Of the newest checkpoint (its step is the second number) whose files have the sizes that its manifest says
        (their content is checked when it is loaded); `NOTHING` if there is none. Torn ones are said. For folders only.
        """
        for step in self._by_precedence():
            if step not in passed_over:
                try:
                    return _manifest_of_sizes(Path(self.path(step))).precedence
                except Torn as torn:
                    say(_torn_and_not_used(self.path(step), torn))
        return NOTHING

    def newest(self, say: Say) -> tuple[Manifest, StateTree] | None:
        """The newest whole checkpoint; torn ones are passed over and said."""
        with _told(self.root):
            for step in self._by_precedence():
                try:
                    return load(self.path(step))
                except Torn as torn:
                    say(_torn_and_not_used(self.path(step), torn))
            return None


def _torn_and_not_used(path: str, torn: Torn) -> str:
    return f"checkpoint {path} is torn and not used: {torn} [checkpoint-torn]"


@contextmanager
def _told(place: str) -> Iterator[None]:
    """Whatever goes wrong at the place becomes `checkpoint-failed` with the cause. fsspec's file systems raise what
    they like: ValueError for an unknown protocol, ImportError for its package, their own for the network."""
    try:
        yield
    except (RacimoError, Torn):
        raise
    except Exception as error:
        raise RacimoError(
            "checkpoint-failed",
            f"checkpoints at {place} are out of reach: {str(error) or type(error).__name__}",
            "name a folder, or a URL whose fsspec package is in the run's environment",
        ) from error


def load(path: str) -> tuple[Manifest, StateTree]:
    """One checkpoint. Raises `Torn` unless every file is what the manifest says."""
    with _at_hand(path) as folder:
        manifest = _checked_manifest(folder)
        return manifest, _read(folder)


def resume(path: str, say: Say) -> tuple[Manifest, StateTree]:
    """What a user named: a `step-N` folder, or one that holds some. Raises `checkpoint-torn` if none is whole."""
    if _STEP.fullmatch(path.rstrip("/").rsplit("/", 1)[-1]):
        try:
            with _told(path):
                return load(path)
        except Torn as torn:
            raise RacimoError(
                "checkpoint-torn", f"the checkpoint {path} is torn: {torn}", "name an earlier one, or their folder"
            ) from torn
    found = Shelf(path).newest(say)
    if found is None:
        raise RacimoError("checkpoint-torn", f"there is no whole checkpoint in {path}", f"look with: ls {path}")
    return found


def _write(work: Path, step: int, run: str, attempt: int, identity: Identity, tree: StateTree) -> Manifest:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    _expect_no_process_group()
    try:
        structure, tensors = split(tree)
        save({STRUCTURE: structure, **tensors}, storage_writer=FileSystemWriter(work, sync_files=True), no_dist=True)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        raise next((cause for cause in causes if isinstance(cause, OSError)), error) from error
    files = {entry.name: FileRecord(entry.stat().st_size, _sha256(entry)) for entry in sorted(work.iterdir())}
    manifest = Manifest(step=step, run=run, identity=identity, files=files, attempt=attempt)
    with (work / MANIFEST).open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(work)
    work.chmod(0o700)
    return manifest


def _read(folder: Path) -> StateTree:
    """All of a checkpoint, whatever is in it: the shapes come from its own metadata."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load as load_into

    _expect_no_process_group()
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    flat: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }
    load_into(flat, storage_reader=reader, no_dist=True)
    return join(flat.pop(STRUCTURE), flat)


def _checked_manifest(folder: Path) -> Manifest:
    manifest = _manifest_of_sizes(folder)
    for name, record in manifest.files.items():
        if _sha256(folder / name) != record.sha256:
            raise Torn(f"the content of {name} is not what was written")
    return manifest


def _manifest_of_sizes(folder: Path) -> Manifest:
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except NotADirectoryError as error:
        raise Torn("it is a file, not a folder") from error
    except FileNotFoundError as error:
        raise Torn(f"it has no {MANIFEST}") from error
    except msgspec.DecodeError as error:
        raise Torn(f"its {MANIFEST} cannot be read ({error})") from error
    for name, record in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise Torn(f"{name} is missing")
        if file.stat().st_size != record.size_bytes:
            raise Torn(f"{name} has {file.stat().st_size} of {record.size_bytes} bytes")
    return manifest


@contextmanager
def _at_hand(path: str) -> Iterator[Path]:
    """The checkpoint as a local folder; downloaded first if it is at a URL."""
    if "://" not in path or path.startswith("file://"):
        yield Path(path.removeprefix("file://"))
        return
    with tempfile.TemporaryDirectory(prefix="racimo-checkpoint-") as folder:
        fs, remote = fsspec.core.url_to_fs(path)
        for name in fs.ls(remote, detail=False) if fs.exists(remote) else ():
            fs.get_file(name, f"{folder}/{name.rsplit('/', 1)[-1]}")
        yield Path(folder)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
