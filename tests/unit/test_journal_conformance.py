"""Every store of the journal passes the same suite."""

from collections.abc import Callable
from pathlib import Path

import pytest

from racimo.act.journal import Journal, MemoryDisk, MemoryJournal, SqliteJournal
from racimo.spec.run import RunSpec
from racimo.state.events import NodeSilent, Record, RunSubmitted, StopRequested

Open = Callable[[], Journal]


@pytest.fixture(params=["memory", "sqlite"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same journal anew, as after a crash: what was not committed is gone."""
    disk = MemoryDisk()
    if request.param == "memory":
        return lambda: MemoryJournal(disk)
    return lambda: SqliteJournal(tmp_path / "control" / "journal.db")


def record(seq: int, run: str = "") -> Record:
    event = StopRequested(run=run) if run else NodeSilent(node="n")
    return Record(seq=seq, at_s=float(seq), wall_s=1.5, event=event)


def loaded(journal: Journal) -> tuple[bytes | None, list[Record]]:
    content, records = journal.load()
    return content, list(records)


def test_a_new_journal_is_empty_and_has_nothing_to_say(reopen: Open) -> None:
    journal = reopen()
    assert loaded(journal) == (None, [])
    assert (journal.durable_seq, journal.notes) == (0, ())


def test_what_was_committed_comes_back_in_order(reopen: Open) -> None:
    journal = reopen()
    spec = RunSpec(train="t.py:f", config={"lr": 0.1, "deep": [1, {"x": None}]}, workers="2..4")
    submitted = Record(
        seq=1, at_s=0.1 + 0.2, wall_s=1e9, event=RunSubmitted(run="a-1", spec=spec, request="r", wall_s=1.0)
    )
    journal.append(submitted)
    journal.append(record(2))
    journal.commit()
    assert loaded(reopen()) == (None, [submitted, record(2)])


def test_what_was_only_appended_is_gone_after_a_crash(reopen: Open) -> None:
    journal = reopen()
    journal.append(record(1))
    journal.commit()
    journal.append(record(2))
    assert journal.durable_seq == 1
    assert reopen().durable_seq == 1


def test_appending_goes_on_after_a_reopening(reopen: Open) -> None:
    for seq in (1, 2, 3):
        journal = reopen()
        journal.append(record(seq))
        journal.close()
    assert loaded(reopen())[1] == [record(1), record(2), record(3)]


def test_committing_nothing_is_nothing(reopen: Open) -> None:
    journal = reopen()
    journal.commit()
    assert reopen().durable_seq == 0


def test_a_gap_in_the_sequence_is_our_mistake(reopen: Open) -> None:
    with pytest.raises(AssertionError):
        reopen().append(record(2))


def test_a_snapshot_stands_for_the_records_before_it(reopen: Open) -> None:
    journal = reopen()
    for seq in (1, 2):
        journal.append(record(seq))
    journal.commit()
    journal.save_snapshot(2, b"state")
    journal.append(record(3))
    journal.commit()
    again = reopen()
    assert loaded(again) == (b"state", [record(3)])
    assert list(again.records()) == [record(1), record(2), record(3)]


def test_the_newest_snapshot_is_taken(reopen: Open) -> None:
    journal = reopen()
    for seq in range(1, 5):
        journal.append(record(seq))
        journal.commit()
        journal.save_snapshot(seq, b"state %d" % seq)
    assert loaded(reopen()) == (b"state 4", [])


def test_the_story_of_one_run_is_its_records_alone(reopen: Open) -> None:
    journal = reopen()
    for seq, run in enumerate(("a-1", "", "b-2", "a-1"), start=1):
        journal.append(record(seq, run))
    journal.commit()
    assert [r.seq for r in journal.records("a-1")] == [1, 4]
    assert [r.seq for r in journal.records("a-1", after_seq=1)] == [4]
