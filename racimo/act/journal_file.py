"""The journal in one SQLite file: checked on opening, cut where it is damaged, never half written."""

import os
import shutil
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from racimo.act.records import decode_record, encode_record, run_of
from racimo.act.wal import inspect_wal
from racimo.spec.errors import RacimoError
from racimo.state.events import Record

SNAPSHOTS_KEPT = 2
FORMAT_VERSION = 1
CHECKPOINT_EVERY_PAGES = 200
"""Small, so that reading the write-ahead log on opening takes milliseconds."""
MIN_FREE_BYTES = 1 << 20
"""With less than this left, an I/O error of SQLite is taken for a full disk."""

_SCHEMA = f"""
    CREATE TABLE IF NOT EXISTS records (seq INTEGER PRIMARY KEY, run TEXT NOT NULL, payload BLOB NOT NULL,
                                        chain INTEGER NOT NULL);
    CREATE INDEX IF NOT EXISTS records_by_run ON records (run, seq) WHERE run != '';
    CREATE TABLE IF NOT EXISTS snapshots (seq INTEGER PRIMARY KEY, payload BLOB NOT NULL, crc INTEGER NOT NULL,
                                          chain INTEGER NOT NULL);
    PRAGMA user_version = {FORMAT_VERSION};
"""

Row = tuple[int, str, bytes, int]
"""seq, run, payload, chain; `chain` is the CRC-32 of the payload begun with the chain of the row before."""


class _Snapshot(msgspec.Struct, frozen=True):
    seq: int
    payload: bytes
    chain: int


class _Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What could be read of a database: its newest sound snapshot, the sound rows after it, and what went wrong."""

    snapshot: _Snapshot
    rows: list[Row]
    problem: str = ""

    @property
    def seq(self) -> int:
        return self.snapshot.seq + len(self.rows)


_NOTHING = _Snapshot(0, b"", 0)


class SqliteJournal:
    """The journal in one SQLite file (0600) in WAL mode with full synchronous writes.

    Opening checks it: a torn write-ahead log is said before SQLite drops it; a damaged file is cut at its first bad
    row, the sound part moved into a new file and the damaged one kept beside it. `RacimoError`: `journal-unreadable`
    where nothing sound is left or a newer version wrote it, `disk-full`.

    `commit` may run in another thread while `append` goes on; one commit at a time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._notes: list[str] = []
        self._pending: list[Row] = []
        self.was_cut = False
        self._repaired = path.with_name(path.name + ".repaired")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._repaired.exists():
            self._swap_in_repaired()
        self._look_at_log()
        self._db = self._open()
        contents = self._read()
        if contents.problem:
            contents = self._repair(contents)
        self._snapshot = contents.snapshot
        self._loaded: list[Row] = contents.rows
        self._durable_seq = self._last_seq = contents.seq
        self._chain = contents.rows[-1][3] if contents.rows else contents.snapshot.chain

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    @property
    def durable_seq(self) -> int:
        return self._durable_seq

    def load(self) -> tuple[bytes | None, Iterator[Record]]:
        rows, self._loaded = self._loaded, []
        return self._snapshot.payload or None, (_decode_row(row) for row in rows)

    def append(self, record: Record) -> None:
        assert record.seq == self._last_seq + 1, f"record {record.seq} after {self._last_seq}"
        payload = encode_record(record)
        self._chain = zlib.crc32(payload, self._chain)
        self._last_seq = record.seq
        self._pending.append((record.seq, run_of(record), payload, self._chain))

    def commit(self) -> None:
        batch = self._pending[:]
        if not batch:
            return
        self._transact([("INSERT INTO records VALUES (?, ?, ?, ?)", row) for row in batch])
        del self._pending[: len(batch)]
        self._durable_seq = batch[-1][0]

    def save_snapshot(self, seq: int, content: bytes) -> None:
        assert seq == self._durable_seq == self._last_seq
        row = (seq, content, zlib.crc32(content), self._chain)
        drop = "DELETE FROM snapshots WHERE seq NOT IN (SELECT seq FROM snapshots ORDER BY seq DESC LIMIT ?)"
        insert = "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)"
        self._transact([(insert, row), (drop, (SNAPSHOTS_KEPT,))])

    def records(self, run: str = "", after_seq: int = 0) -> list[Record]:
        query = "SELECT seq, run, payload, chain FROM records WHERE seq > ?" + (" AND run = ?" if run else "")
        found = self._db.execute(query + " ORDER BY seq", (after_seq, run) if run else (after_seq,))
        return [_decode_row(row) for row in found]

    def close(self) -> None:
        self.commit()
        self._db.close()

    def _transact(self, statements: list[tuple[str, tuple[object, ...]]]) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for statement, values in statements:
                self._db.execute(statement, values)
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if self._is_full(error):
                raise self._disk_full() from error
            raise

    def _is_full(self, error: sqlite3.Error) -> bool:
        primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if primary == sqlite3.SQLITE_FULL:
            return True
        space = os.statvfs(self._path.parent)
        return primary == sqlite3.SQLITE_IOERR and space.f_bavail * space.f_frsize < MIN_FREE_BYTES

    def _disk_full(self) -> RacimoError:
        return RacimoError(
            "disk-full",
            f"no space left for the journal in {self._path.parent}; nothing is lost, it goes on when there is space",
            f"df -h {self._path.parent}",
        )

    # Opening

    def _look_at_log(self) -> None:
        report = inspect_wal(self._beside("-wal"))
        if report.note:
            self._notes.append(report.note)
        if report.lost_records:
            self.was_cut = True
            kept = self._free_name()
            for suffix in ("", "-wal"):
                if self._beside(suffix).exists():
                    shutil.copy2(self._beside(suffix), kept.with_name(kept.name + suffix))
            self._notes.append(f"the damaged journal is kept as {kept}")

    def _open(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        try:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version > FORMAT_VERSION:
                raise RacimoError(
                    "journal-unreadable",
                    f"{self._path} has format {version}, a newer Racimo's; this one reads up to {FORMAT_VERSION}",
                    "pip install --upgrade racimo",
                )
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_EVERY_PAGES}")
            db.executescript(_SCHEMA)
        except sqlite3.OperationalError as error:
            if self._is_full(error):
                raise self._disk_full() from error
            raise RacimoError("journal-unreadable", f"{self._path} cannot be opened: {error}") from error
        except sqlite3.DatabaseError as error:
            # Reading says where the damage begins. A file shorter than its header says is read only in this mode.
            self._notes.append(f"{self._path} is damaged: {error}")
            db.execute("PRAGMA writable_schema = ON")
        return db

    def _read(self) -> _Contents:
        """The newest state that can be had: from the newest sound snapshot on, or from the first record."""
        best = _Contents(snapshot=_NOTHING, rows=[])
        problem = ""
        try:
            snapshots = self._read_snapshots()
        except sqlite3.DatabaseError as error:
            snapshots, problem = [], str(error)
        for snapshot in (*snapshots, _NOTHING):
            contents = self._read_rows(snapshot)
            if not contents.problem and not problem:
                return contents
            problem = problem or contents.problem
            best = max(best, contents, key=lambda found: found.seq)
        return msgspec.structs.replace(best, problem=problem)

    def _read_snapshots(self) -> list[_Snapshot]:
        """Sound ones, newest first."""
        found = self._db.execute("SELECT seq, payload, crc, chain FROM snapshots ORDER BY seq DESC")
        return [_Snapshot(seq, payload, chain) for seq, payload, crc, chain in found if zlib.crc32(payload) == crc]

    def _read_rows(self, snapshot: _Snapshot) -> _Contents:
        rows: list[Row] = []
        seq, chain, problem = snapshot.seq, snapshot.chain, ""
        try:
            for row in self._db.execute(
                "SELECT seq, run, payload, chain FROM records WHERE seq > ? ORDER BY seq", (seq,)
            ):
                if row[0] != seq + 1 or zlib.crc32(row[2], chain) != row[3]:
                    problem = f"record {seq + 1} is {'missing' if row[0] != seq + 1 else 'damaged'}"
                    break
                seq, chain = row[0], row[3]
                rows.append(row)
        except (sqlite3.DatabaseError, TypeError) as error:
            problem = f"record {seq + 1} cannot be read ({error})"
        return _Contents(snapshot=snapshot, rows=rows, problem=problem)

    # Repair

    def _repair(self, contents: _Contents) -> _Contents:
        if contents.seq == 0:
            raise RacimoError(
                "journal-unreadable",
                f"{self._path} cannot be read from its first record on ({contents.problem}), and it holds no snapshot",
                f"mv {self._path} {self._path}.unreadable && racimo up  # begins an empty cluster",
            )
        before = self._read_rows(_NOTHING).rows if contents.snapshot.seq else []
        num_beyond = self._count_beyond(contents.seq)
        fresh = self._repaired.with_name(self._repaired.name + ".part")
        fresh.unlink(missing_ok=True)
        os.close(os.open(fresh, os.O_RDWR | os.O_CREAT, 0o600))
        self._write_copy(fresh, contents, [row for row in before if row[0] <= contents.snapshot.seq])
        self._db.close()
        fresh.replace(self._repaired)
        kept = self._swap_in_repaired()
        lost = f"{num_beyond} or more records after it are lost" if num_beyond else "what came after it is lost"
        self._notes.append(
            f"the journal was damaged ({contents.problem}): it is cut after record {contents.seq}, {lost};"
            f" the damaged file is kept as {kept}"
        )
        self._db = self._open()
        self.was_cut = True
        return msgspec.structs.replace(contents, problem="")

    def _count_beyond(self, seq: int) -> int:
        try:
            return int(self._db.execute("SELECT count(*) FROM records WHERE seq > ?", (seq,)).fetchone()[0])
        except sqlite3.DatabaseError:
            return 0

    def _write_copy(self, path: Path, contents: _Contents, before: list[Row]) -> None:
        copy = sqlite3.connect(path, isolation_level=None)
        try:
            copy.execute("PRAGMA synchronous = FULL")
            copy.executescript(_SCHEMA)
            copy.execute("BEGIN")
            copy.executemany("INSERT INTO records VALUES (?, ?, ?, ?)", [*before, *contents.rows])
            kept = contents.snapshot
            if kept.seq:
                values = (kept.seq, kept.payload, zlib.crc32(kept.payload), kept.chain)
                copy.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?)", values)
            copy.execute("COMMIT")
        finally:
            copy.close()

    def _swap_in_repaired(self) -> Path:
        """Puts the repaired file in place; may be cut off anywhere and done again, as the repaired file goes last."""
        kept = self._free_name()
        for suffix in ("-wal", "-shm", ""):
            if self._beside(suffix).exists():
                self._beside(suffix).replace(kept.with_name(kept.name + suffix))
        self._repaired.replace(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return kept

    def _free_name(self) -> Path:
        number = 1
        while any(self._beside(f".damaged-{number}{suffix}").exists() for suffix in ("", "-wal", "-shm")):
            number += 1
        return self._beside(f".damaged-{number}")

    def _beside(self, suffix: str) -> Path:
        return self._path.with_name(self._path.name + suffix)


def _decode_row(row: Row) -> Record:
    try:
        return decode_record(row[2])
    except ValueError as error:
        raise RacimoError(
            "journal-unreadable",
            f"record {row[0]} of the journal is whole, but this version does not know it ({error})",
            "pip install --upgrade racimo",
        ) from error
