"""The files of a run, by content: what belongs to it, how big it is, and sending only what the cluster lacks.

Left out: `.git`, virtual environments, `__pycache__`, folders tagged as caches, the cluster's own home, backups of
clusters, what `racimo get` fetched, and what `.racimoignore` files name (in gitignore's syntax). Links that lead to
something inside are kept as what they lead to; others are left out and named.
"""

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from racimo.agent.protocol import FileEntry
from racimo.client.hash_cache import HashCache
from racimo.control.snapshots import MAX_BLOB_BYTES
from racimo.spec.errors import RacimoError
from racimo.spec.quantity import format_size

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILE = ".racimoignore"
ALWAYS_LEFT_OUT = frozenset({".git", "__pycache__"})
LEFT_OUT_WITH = ("pyvenv.cfg", "CACHEDIR.TAG")
"""A folder with such a file is a virtual environment, or says itself that it is a cache (bford.info/cachedir)."""
FETCHED_MARK = ".racimo-fetched"
"""In a folder that `racimo get` made for what it fetched."""
TAR_BLOCK_BYTES = 512
MAX_FILES = 15_000
"""What one request of the API has room for."""
NAMED_FOLDERS = 5
NAMED_SKIPS = 5
READ_BYTES = 2**20


class LocalFile(msgspec.Struct, frozen=True, kw_only=True):
    """`path`: below the root, with `/`. `source`: where its content is."""

    path: str
    source: Path
    size_bytes: int
    mode: int
    mtime_ns: int
    inode: int


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """`skipped`: what was left out without being asked to, as words for people."""

    root: Path
    files: tuple[LocalFile, ...]
    skipped: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class _Ignored:
    """The `.racimoignore` files from the root down to one folder; a deeper one has the last word, as in git."""

    def __init__(self, rules: tuple[tuple[str, "GitIgnoreSpec"], ...] = ()) -> None:
        self._rules = rules

    def below(self, folder: Path, prefix: str) -> "_Ignored":
        try:
            lines = (folder / IGNORE_FILE).read_text().splitlines()
        except FileNotFoundError:
            return self
        except (OSError, UnicodeDecodeError) as error:
            raise RacimoError("file-unreadable", f"cannot read {folder / IGNORE_FILE}: {error}") from None
        try:
            from pathspec import GitIgnoreSpec

            spec = GitIgnoreSpec.from_lines(lines)
        except ValueError as error:
            raise RacimoError("invalid-spec", f"{folder / IGNORE_FILE}: {error}") from None
        return _Ignored((*self._rules, (prefix, spec)))

    def matches(self, path: str, *, is_folder: bool) -> bool:
        for prefix, spec in reversed(self._rules):
            name = path[len(prefix) :] + ("/" if is_folder else "")
            verdict = spec.check_file(name).include
            if verdict is not None:
                return verdict
        return False


def scan(root: Path, *, max_bytes: int, home: Path | None = None) -> Scan:
    """Walks `root`. Raises `upload-too-large`, naming the largest folders, and `file-unreadable`."""
    if not root.is_dir():
        code = "file-unreadable" if root.exists() else "file-missing"
        raise RacimoError(code, f"files: {root} is not a folder", "--files DIR, or --no-files to send nothing")
    walk = _Walk(root, home)
    for file in walk.folder(root, "", _Ignored(), frozenset()):
        walk.files.append(file)
        if len(walk.files) > MAX_FILES * 10:
            break  # a home directory or the whole disk: enough is known to refuse it
    found = Scan(root=root, files=tuple(sorted(walk.files, key=lambda f: f.path)), skipped=tuple(walk.skipped))
    _check_size(found, max_bytes)
    return found


class _Walk:
    def __init__(self, root: Path, home: Path | None) -> None:
        self.real_root = Path(os.path.realpath(root))
        self.real_home = None if home is None else Path(os.path.realpath(home))
        self.files: list[LocalFile] = []
        self.skipped: list[str] = []

    def folder(self, folder: Path, prefix: str, ignored: _Ignored, above: frozenset[str]) -> Iterator[LocalFile]:
        """`above`: the real paths of the folders around, so that a link upwards is no endless walk."""
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise _unreadable(folder, error) from None
        ignored = ignored.below(folder, prefix)
        inside = above | {os.path.realpath(folder)}
        for entry in entries:
            path = prefix + entry.name
            if entry.name in ALWAYS_LEFT_OUT or (entry.name == IGNORE_FILE):
                continue
            try:
                is_folder = entry.is_dir()
                if ignored.matches(path, is_folder=is_folder) or not self._may_follow(entry, path, inside):
                    continue
                _check_name(path, entry)
                if is_folder:
                    if Path(entry.path, FETCHED_MARK).exists():
                        self.skipped.append(f"{path}/ (fetched by racimo get; without its {FETCHED_MARK} it is sent)")
                    elif not self._left_out(Path(entry.path)):
                        yield from self.folder(Path(entry.path), f"{path}/", ignored, inside)
                    continue
                about = entry.stat()
            except FileNotFoundError:
                continue  # deleted meanwhile
            except OSError as error:
                raise _unreadable(Path(entry.path), error) from None
            if not stat.S_ISREG(about.st_mode):
                self.skipped.append(f"{path} (not a file)")
                continue
            if about.st_size and about.st_size % TAR_BLOCK_BYTES == 0 and _is_backup(entry.path):
                self.skipped.append(f"{path} (a backup of a cluster, with its secrets)")
                continue
            yield LocalFile(
                path=path,
                source=Path(entry.path),
                size_bytes=about.st_size,
                mode=stat.S_IMODE(about.st_mode) & 0o777,
                mtime_ns=about.st_mtime_ns,
                inode=about.st_ino,
            )

    def _left_out(self, folder: Path) -> bool:
        is_home = self.real_home is not None and Path(os.path.realpath(folder)) == self.real_home
        return is_home or any((folder / name).exists() for name in LEFT_OUT_WITH)

    def _may_follow(self, entry: os.DirEntry[str], path: str, inside: frozenset[str]) -> bool:
        if not entry.is_symlink():
            return True
        target = os.path.realpath(entry.path)
        if not Path(target).exists():
            self.skipped.append(f"{path} (a link to nothing)")
        elif not Path(target).is_relative_to(self.real_root):
            self.skipped.append(f"{path} (a link out of the folder, to {target})")
        elif target in inside:
            self.skipped.append(f"{path} (a link to a folder around it)")
        else:
            return True
        return False


def _is_backup(path: str) -> bool:
    """Whether this is what `racimo backup` writes: a tar whose first member says of which cluster."""
    from racimo.control.backup import ABOUT

    try:
        with open(path, "rb") as file:
            head = file.read(TAR_BLOCK_BYTES)
    except OSError:
        return False  # said when it is read whole
    return head.startswith(ABOUT.encode() + b"\0") and head[257:262] == b"ustar"


def _check_name(path: str, entry: os.DirEntry[str]) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        hint = f"rename it, or leave it out with a line in {IGNORE_FILE}"
        message = f"{ascii(path)[1:-1]} (in {Path(entry.path).parent}): the name is not UTF-8 and cannot be sent"
        raise RacimoError("file-unreadable", message, hint) from None


def _unreadable(path: Path, error: OSError) -> RacimoError:
    hint = f"leave it out with a line in {IGNORE_FILE}; or --files DIR to send another folder, --no-files to send none"
    return RacimoError("file-unreadable", f"cannot read {path}: {error.strerror}", hint)


def _check_size(found: Scan, max_bytes: int) -> None:
    hint = f"leave out what the run does not need in {found.root / IGNORE_FILE} (gitignore syntax), or --files DIR"
    if found.size_bytes > max_bytes:
        raise RacimoError(
            "upload-too-large",
            f"{found.root} has {format_size(found.size_bytes)} in {len(found.files)} files, more than "
            f"{format_size(max_bytes)}; the largest: {_largest(found, lambda file: file.size_bytes, format_size)}",
            f"{hint}, or --max-upload {format_size(found.size_bytes * 1.1).replace(' ', '')}",
        )
    if len(found.files) > MAX_FILES:
        most = _largest(found, lambda file: 1, lambda count: f"{count:.0f} files")
        count = len(found.files)
        raise RacimoError("upload-too-large", f"{found.root} has {count} files, more than {MAX_FILES}: {most}", hint)
    for file in found.files:
        if file.size_bytes > MAX_BLOB_BYTES:
            raise RacimoError(
                "upload-too-large",
                f"{file.path} has {format_size(file.size_bytes)}; a single file has at most "
                f"{format_size(MAX_BLOB_BYTES)}",
                f"data of this size is better read from where it is: leave it out in {found.root / IGNORE_FILE}",
            )


def _largest(found: Scan, measure: Callable[[LocalFile], int], show: Callable[[float], str]) -> str:
    sizes: Counter[str] = Counter()
    for file in found.files:
        sizes[f"{file.path.split('/')[0]}/" if "/" in file.path else file.path] += measure(file)
    return ", ".join(f"{name} {show(size)}" for name, size in sizes.most_common(NAMED_FOLDERS))


def hash_files(found: Scan, cache: HashCache) -> tuple[FileEntry, ...]:
    entries = []
    for file in found.files:
        sha256 = cache.get(file.path, file.size_bytes, file.mtime_ns, file.inode)
        if sha256 is None:
            sha256 = _hash(file.source)
            cache.put(file.path, file.size_bytes, file.mtime_ns, file.inode, sha256)
        entries.append(FileEntry(file.path, file.mode, file.size_bytes, sha256))
    cache.save()
    return tuple(entries)


def _hash(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from None


def read_parts(file: LocalFile, sha256: str) -> Iterator[bytes]:
    """The content in pieces, checked before the last one: a file that changed since it was hashed is never sent whole.
    Raises `file-unreadable`."""
    digest = hashlib.sha256()
    left_bytes = file.size_bytes
    try:
        with open(file.source, "rb") as source:
            while left_bytes > READ_BYTES:
                part = source.read(READ_BYTES)
                if not part:
                    break
                digest.update(part)
                left_bytes -= len(part)
                yield part
            last = source.read(left_bytes + 1)
    except OSError as error:
        raise _unreadable(file.source, error) from None
    digest.update(last)
    if digest.hexdigest() != sha256:
        raise RacimoError(
            "file-unreadable",
            f"{file.source} changed while it was being sent",
            f"submit again; a file that something keeps writing to belongs into {IGNORE_FILE}",
        )
    yield last


def skipped_words(found: Scan) -> str:
    """One line about what was left out, or ""."""
    shown = "; ".join(found.skipped[:NAMED_SKIPS])
    more = len(found.skipped) - NAMED_SKIPS
    return shown + (f"; and {more} more" if more > 0 else "")
