"""The agent's spool: numbered, kept until acknowledged, whatever dies."""

from pathlib import Path

import pytest

from racimo.agent import spool as spool_module
from racimo.agent.spool import Spool
from racimo.state.events import WorkerStarted


def event(index: int) -> WorkerStarted:
    return WorkerStarted(run="r", attempt=1, index=index, pid=100 + index)


def numbers(spool: Spool, after: int = 0, limit: int = 10) -> list[int]:
    return [numbered.number for numbered in spool.take(after, limit)]


def test_events_keep_their_numbers_across_a_restart(tmp_path: Path) -> None:
    first = Spool(tmp_path / "events")
    assert [first.append(event(index)) for index in range(3)] == [1, 2, 3]
    second = Spool(tmp_path / "events")
    assert second.take(0, 10) == first.take(0, 10)
    assert second.append(event(9)) == 4


def test_what_was_acknowledged_is_not_given_again_even_after_a_restart(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "events")
    for index in range(3):
        spool.append(event(index))
    assert numbers(spool, after=2) == [3]
    assert numbers(Spool(tmp_path / "events")) == [3]


def test_a_cursor_of_zero_acknowledges_nothing(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "events")
    spool.append(event(0))
    assert numbers(spool) == numbers(spool) == [1]


def test_a_batch_is_bounded(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "events")
    for index in range(5):
        spool.append(event(index))
    assert numbers(spool, limit=2) == [1, 2]


def test_a_torn_last_line_is_cut_off_and_its_number_used_again(tmp_path: Path) -> None:
    path = tmp_path / "events"
    spool = Spool(path)
    spool.append(event(0))
    with open(path, "ab") as file:
        file.write(b'{"number":2,"ev')
    reopened = Spool(path)
    assert numbers(reopened) == [1]
    assert reopened.append(event(5)) == 2
    assert numbers(Spool(path)) == [1, 2]


def test_numbers_go_on_after_what_control_has_seen_when_the_file_was_lost(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "events")
    spool.append(event(0))
    assert numbers(spool, after=100) == [101]
    assert spool.append(event(1)) == 102
    assert numbers(Spool(tmp_path / "events")) == [101, 102]


def test_the_file_shrinks_once_it_is_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "REWRITE_BYTES", 500)
    path = tmp_path / "events"
    spool = Spool(path)
    for index in range(20):
        spool.append(event(index))
    size = path.stat().st_size
    assert numbers(spool, after=19) == [20]
    assert path.stat().st_size < size / 5
    assert spool.append(event(0)) == 21
    assert numbers(Spool(path)) == [20, 21]


def test_a_full_spool_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "MAX_PENDING", 2)
    spool = Spool(tmp_path / "events")
    spool.append(event(0))
    assert not spool.full
    spool.append(event(1))
    assert spool.full
