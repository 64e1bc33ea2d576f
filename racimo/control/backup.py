"""A copy of all that makes a cluster this cluster, taken while it works: what `racimo backup FILE` keeps.

A tar of the home's own paths. Not in it: outputs, logs, and what nodes keep of their workers. The journal is copied
first (SQLite's backup), so that every snapshot that it names is among the files copied after it.
"""

import asyncio
import io
import os
import sqlite3
import tarfile
import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import IO

import msgspec

from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.version import __version__

ABOUT = "backup.json"
PART_BYTES = 2**20


class About(msgspec.Struct, frozen=True):
    """`backup.json`, the first member: which cluster this is a copy of."""

    cluster: str
    version: str
    wall_s: float


def kept_files(home: Home) -> Iterator[Path]:
    """The files of a home that go into a backup, the journal excepted. Not all of them need to be there."""
    yield home.token_file
    yield home.config_file
    yield home.certificate_file
    yield home.certificate_key_file
    yield home.secrets_file
    yield home.journal_file.parent / "identity.json"
    yield home.node_dir / "id"
    for folder in (home.snapshots_dir, home.blobs_dir):
        yield from sorted(path for path in folder.glob("*") if not path.name.startswith("."))


def make(home: Home, about: About) -> IO[bytes]:
    """The backup in a file without a name, to be read from its beginning. `RacimoError` disk-full, internal."""
    folder = home.journal_file.parent
    try:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (handed on open)
        with tarfile.open(fileobj=file, mode="w|") as tar:
            _add_content(tar, ABOUT, msgspec.json.encode(about))
            with tempfile.TemporaryDirectory(dir=folder, prefix=".backup-") as aside:
                copy = Path(aside, "journal.db")
                _copy_journal(home.journal_file, copy)
                tar.add(copy, str(home.journal_file.relative_to(home.root)))
            for path in kept_files(home):
                if path.exists():
                    tar.add(path, str(path.relative_to(home.root)), recursive=False)
    except OSError as error:
        raise RacimoError("disk-full", f"no room for a backup in {folder}: {error.strerror}", f"df {folder}") from error
    except sqlite3.Error as error:
        raise RacimoError("internal", f"the journal cannot be copied: {error}", "racimo check") from error
    file.seek(0)
    return file


def _add_content(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o600
    tar.addfile(member, io.BytesIO(content))


def _copy_journal(source: Path, target: Path) -> None:
    """All that is durable, in one consistent state, whatever is appended meanwhile."""
    reading = sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)
    writing = sqlite3.connect(target)
    try:
        reading.backup(writing)
    finally:
        reading.close()
        writing.close()


async def parts(file: IO[bytes]) -> AsyncGenerator[bytes, None]:
    with file:
        while part := await asyncio.to_thread(file.read, PART_BYTES):
            yield part


def size_of(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def about_now(cluster: str, wall_s: float) -> About:
    return About(cluster, __version__, wall_s)
