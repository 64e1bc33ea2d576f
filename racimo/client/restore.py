"""A home made from a backup: what `racimo up --from-backup FILE` does before it starts the cluster."""

import os
import re
import shutil
import sqlite3
import tarfile
from pathlib import Path

import msgspec

from racimo.client.say import Say
from racimo.control.backup import ABOUT, About
from racimo.control.private_files import write_private
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

_KEPT = re.compile(
    r"token|config\.json|cluster\.pem|node/id|control/(journal\.db|identity\.json|secrets\.json|cluster\.key)"
    r"|control/(snapshots|blobs)/[0-9a-f]{64}"
)
"""The only paths that are taken from a backup; nothing else can be in one that `racimo backup` made."""
MAX_ABOUT_BYTES = 10_000


def restore(home: Home, file: Path, say: Say) -> About:
    """Fills a home that has no cluster yet. `RacimoError`: wrong-state where it has one, file-unreadable for a file
    that is no whole backup; then the home is as it was."""
    for path in (home.journal_file, home.join_file, home.token_file):
        if path.exists():
            raise RacimoError(
                "wrong-state",
                f"{home.root} holds a cluster already ({path.relative_to(home.root)})",
                f"export RACIMO_HOME=DIR   # another folder; or first: mv {home.root} {home.root}.old",
            )
    draft = home.root.with_name(f".{home.root.name}.restoring.{os.getpid()}")
    try:
        draft.mkdir(mode=0o700, parents=True)
        about = _unpack(file, draft)
        _check_journal(Home(draft), file)
        home.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(Home(draft).restored_file, msgspec.json.encode(about))
        for part in sorted(draft.iterdir()):
            _move_into(part, home.root / part.name)
    except (tarfile.TarError, EOFError) as error:
        raise _no_backup(file, str(error)) from None
    except OSError as error:
        what = error.filename or file
        raise RacimoError("file-unreadable", f"cannot restore from {file}: {what}: {error.strerror}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    say(f"cluster {about.cluster} as of its backup; runs that began since then are not known, their outputs stay")
    return about


def _unpack(file: Path, draft: Path) -> About:
    about: About | None = None
    with tarfile.open(file, mode="r:") as tar:
        for member in tar:
            if member.name == ABOUT and member.isreg() and member.size <= MAX_ABOUT_BYTES:
                content = tar.extractfile(member)
                assert content is not None
                about = _decode(content.read(), file)
                continue
            if not member.isreg() or not _KEPT.fullmatch(member.name):
                raise _no_backup(file, f"it holds {member.name[:100]!r}")
            target = draft / member.name
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                shutil.copyfileobj(source, out)
    if about is None or not (draft / "token").exists():
        raise _no_backup(file, "it does not say of which cluster")
    return about


def _decode(content: bytes, file: Path) -> About:
    try:
        return msgspec.json.decode(content, type=About)
    except msgspec.MsgspecError as error:
        raise _no_backup(file, str(error)) from None


def _check_journal(home: Home, file: Path) -> None:
    """`RacimoError` for a journal that is not whole: found now, not after the home is in use."""
    try:
        connection = sqlite3.connect(f"{home.journal_file.as_uri()}?mode=ro", uri=True)
        try:
            verdict = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
        finally:
            connection.close()
    except sqlite3.Error as error:
        verdict = str(error)
    if verdict != "ok":
        raise _no_backup(file, f"its journal is damaged: {verdict}")


def _move_into(source: Path, target: Path) -> None:
    """As `mv`, into folders that are there (such as `node/` of an earlier life)."""
    if source.is_dir() and target.is_dir():
        for part in sorted(source.iterdir()):
            _move_into(part, target / part.name)
    else:
        source.replace(target)


def _no_backup(file: Path, why: str) -> RacimoError:
    return RacimoError("file-unreadable", f"{file} is no whole backup: {why}", "racimo backup FILE   # makes one")
