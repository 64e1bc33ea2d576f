"""Where the journal is kept: one small protocol, and the two stores that pass its conformance suite.

`append` buffers, `commit` makes everything appended so far durable in one transaction. Only what is durable may have
effects. Records have consecutive `seq` from 1 on.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

from racimo.act.journal_file import SqliteJournal
from racimo.act.records import decode_record, encode_record, run_of
from racimo.state.events import Record

__all__ = ["SNAPSHOT_EVERY_RECORDS", "Journal", "MemoryDisk", "MemoryJournal", "SqliteJournal"]

SNAPSHOT_EVERY_RECORDS = 2_000


class Journal(Protocol):
    """A store of records and snapshots."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found wrong on opening and what was done about it, for people; empty if all was well."""
        ...

    @property
    def was_cut(self) -> bool:
        """True if durable records were lost to damage that opening found."""
        ...

    @property
    def durable_seq(self) -> int:
        """The newest record that survives a crash."""
        ...

    def load(self) -> tuple[bytes | None, Iterator[Record]]:
        """The newest sound snapshot (or None) and the records after it, to be read at once."""
        ...

    def append(self, record: Record) -> None: ...

    def commit(self) -> None:
        """`RacimoError`: `disk-full`; what was appended is kept, and the same call may be made again."""
        ...

    def save_snapshot(self, seq: int, content: bytes) -> None:
        """Keeps the state as of record `seq`, which is durable. `RacimoError`: `disk-full`."""
        ...

    def records(self, run: str = "", after_seq: int = 0) -> Iterable[Record]:
        """The durable records, of one run or of all, in order."""
        ...

    def close(self) -> None: ...


class MemoryDisk:
    """What is left of a `MemoryJournal` after a crash."""

    def __init__(self) -> None:
        self.rows: list[bytes] = []
        self.snapshot: tuple[int, bytes] | None = None


class MemoryJournal:
    """A journal whose disk outlives it: open another on the same `MemoryDisk` and what was not committed is gone."""

    notes: tuple[str, ...] = ()
    was_cut = False

    def __init__(self, disk: MemoryDisk | None = None) -> None:
        self.disk = disk or MemoryDisk()
        self._pending: list[bytes] = []

    @property
    def durable_seq(self) -> int:
        return len(self.disk.rows)

    def load(self) -> tuple[bytes | None, Iterator[Record]]:
        seq, content = self.disk.snapshot or (0, None)
        return content, iter(self.records(after_seq=seq))

    def append(self, record: Record) -> None:
        assert record.seq == len(self.disk.rows) + len(self._pending) + 1
        self._pending.append(encode_record(record))

    def commit(self) -> None:
        self.disk.rows.extend(self._pending)
        self._pending.clear()

    def save_snapshot(self, seq: int, content: bytes) -> None:
        assert seq <= self.durable_seq
        self.disk.snapshot = (seq, content)

    def records(self, run: str = "", after_seq: int = 0) -> list[Record]:
        decoded = (decode_record(row) for row in self.disk.rows[after_seq:])
        return [record for record in decoded if not run or run_of(record) == run]

    def close(self) -> None:
        self.commit()
