"""A journal on a real disk: torn, damaged, full, of another version."""

import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from racimo.act.journal import SqliteJournal
from racimo.act.wal import inspect_wal
from racimo.spec.errors import RacimoError
from racimo.state.events import NodeSilent, Record


def record(seq: int, size: int = 10) -> Record:
    return Record(seq=seq, at_s=float(seq), wall_s=1.5, event=NodeSilent(node="n" * size))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def fill(path: Path, num: int, *, size: int = 10, snapshot_at: int = 0, close: bool = True) -> None:
    """Journals `num` records, one commit each; without `close` the write-ahead log stays as a kill would leave it."""
    journal = SqliteJournal(path)
    for seq in range(1, num + 1):
        journal.append(record(seq, size))
        journal.commit()
        if seq == snapshot_at:
            journal.save_snapshot(seq, b"state")
    if close:
        journal.close()
    else:
        wal = path.with_name(path.name + "-wal").read_bytes()
        main = path.read_bytes()
        journal.close()
        path.write_bytes(main)
        path.with_name(path.name + "-wal").write_bytes(wal)


def seqs(journal: SqliteJournal) -> list[int]:
    return [r.seq for r in journal.load()[1]]


def wal_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def test_the_files_are_private(path: Path) -> None:
    old = os.umask(0o022)
    try:
        journal = SqliteJournal(path)
        journal.append(record(1))
        journal.commit()
    finally:
        os.umask(old)
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_a_journal_that_was_only_killed_has_nothing_to_say(path: Path) -> None:
    fill(path, 20, close=False)
    assert inspect_wal(wal_of(path)).num_commits > 0
    journal = SqliteJournal(path)
    assert seqs(journal) == list(range(1, 21))
    assert journal.notes == ()


@pytest.mark.parametrize("cut", [1, 24, 500, 4096, 4119])
def test_a_torn_last_write_is_cut_off_and_said(path: Path, cut: int) -> None:
    fill(path, 20, close=False)
    wal = wal_of(path)
    wal.write_bytes(wal.read_bytes()[:-cut])
    journal = SqliteJournal(path)
    assert seqs(journal) == list(range(1, 20))
    assert "cut off" in journal.notes[0]
    journal.append(record(20))
    journal.close()
    again = SqliteJournal(path)
    assert again.durable_seq == 20
    assert again.notes == ()


def test_damage_inside_the_log_is_said_with_what_is_lost(path: Path) -> None:
    """SQLite itself drops everything behind the first bad frame and says nothing."""
    fill(path, 20, close=False)
    wal = wal_of(path)
    content = bytearray(wal.read_bytes())
    content[len(content) // 2] ^= 0xFF
    wal.write_bytes(content)
    journal = SqliteJournal(path)
    assert 0 < journal.durable_seq < 20
    assert "are lost" in journal.notes[0]
    assert list(path.parent.glob("*.damaged-1*"))


def test_a_log_of_an_older_round_behind_the_present_one_is_no_damage(path: Path) -> None:
    journal = SqliteJournal(path)
    for seq in range(1, 400):  # several checkpoints: the log begins anew and leaves old frames behind
        journal.append(record(seq, 200))
        journal.commit()
    wal, main = wal_of(path).read_bytes(), path.read_bytes()
    journal.close()
    path.write_bytes(main)
    wal_of(path).write_bytes(wal)
    again = SqliteJournal(path)
    assert (again.durable_seq, again.notes) == (399, ())


def test_a_damaged_record_cuts_the_journal_there_and_the_damaged_file_is_kept(path: Path) -> None:
    fill(path, 30)
    content = path.read_bytes().replace(b'{"seq":21,', b'{"seq":91,')
    path.write_bytes(content)
    journal = SqliteJournal(path)
    assert seqs(journal) == list(range(1, 21))
    assert "cut after record 20, 10 or more records" in journal.notes[0]
    assert (path.parent / "journal.db.damaged-1").read_bytes()
    journal.append(record(21))
    journal.close()
    assert SqliteJournal(path).durable_seq == 21


def test_a_malformed_page_cuts_the_journal_there(path: Path) -> None:
    fill(path, 200, size=400)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size * 3 // 4 // 4096 * 4096)
        file.write(b"\xa5" * 4096)
    journal = SqliteJournal(path)
    assert 20 < journal.durable_seq < 200
    assert seqs(journal) == list(range(1, journal.durable_seq + 1))
    assert any("damaged" in note for note in journal.notes)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_cut_short_keeps_what_is_readable(path: Path) -> None:
    fill(path, 200, size=400)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2 // 4096 * 4096)
    try:
        journal = SqliteJournal(path)
    except RacimoError as error:
        assert error.code == "journal-unreadable"
    else:
        assert journal.durable_seq > 0
        assert journal.notes


def test_a_snapshot_saves_what_the_records_before_it_cannot(path: Path) -> None:
    fill(path, 30, snapshot_at=25)
    content = path.read_bytes().replace(b'{"seq":11,', b'{"seq":91,').replace(b'{"seq":29,', b'{"seq":99,')
    path.write_bytes(content)
    journal = SqliteJournal(path)
    assert journal.durable_seq == 28
    assert journal.load()[0] == b"state"
    journal.close()
    again = SqliteJournal(path)
    assert (again.durable_seq, again.notes) == (28, ())


def test_a_repair_that_was_cut_off_is_finished(path: Path) -> None:
    fill(path, 3)
    good = path.read_bytes()
    path.write_bytes(b"garbage" * 1000)
    path.with_name("journal.db.repaired").write_bytes(good)
    journal = SqliteJournal(path)
    assert (journal.durable_seq, journal.notes) == (3, ())


def test_garbage_from_the_start_is_an_error_and_stays_untouched(path: Path) -> None:
    path.write_bytes(b"garbage" * 1000)
    with pytest.raises(RacimoError) as caught:
        SqliteJournal(path)
    assert caught.value.code == "journal-unreadable"
    assert path.read_bytes() == b"garbage" * 1000


def test_a_newer_format_is_refused_not_repaired(path: Path) -> None:
    fill(path, 3)
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(RacimoError, match="newer") as caught:
        SqliteJournal(path)
    assert caught.value.code == "journal-unreadable"


def test_a_full_disk_loses_nothing_and_the_same_commit_works_later(path: Path) -> None:
    journal = SqliteJournal(path)
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages + 1}")
    for seq in range(1, 6):
        journal.append(record(seq, 4000))
    with pytest.raises(RacimoError) as caught:
        journal.commit()
    assert caught.value.code == "disk-full"
    assert journal.durable_seq == 0
    journal.append(record(6))
    journal._db.execute("PRAGMA max_page_count = 1000000")
    journal.commit()
    journal.close()
    assert seqs(SqliteJournal(path)) == [1, 2, 3, 4, 5, 6]


def test_what_was_confirmed_survives_a_sigkill(path: Path) -> None:
    """Another process journals and is killed at some moment; all that it had confirmed is there."""
    script = (
        "import sys; from pathlib import Path\n"
        "from racimo.act.journal import SqliteJournal\n"
        "from racimo.state.events import NodeSilent, Record\n"
        "journal = SqliteJournal(Path(sys.argv[1]))\n"
        "for seq in range(1, 100_000):\n"
        "    journal.append(Record(seq=seq, at_s=1.0, wall_s=1.0, event=NodeSilent(node='n' * 300)))\n"
        "    journal.commit()\n"
        "    print(seq, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) == 150:
                writer.kill()
                break
        confirmed = max([150, *(int(line) for line in writer.stdout.read().split(b"\n")[:-1] if line)])
    journal = SqliteJournal(path)
    assert journal.durable_seq >= confirmed
    assert seqs(journal) == list(range(1, journal.durable_seq + 1))
