"""Journals that earlier versions wrote stay readable, and mean what they meant."""

from pathlib import Path
from typing import get_args

import pytest

from racimo.act.records import decode_record, encode_record
from racimo.state.events import Event, Record
from racimo.state.fold import fold

GOLDEN = Path(__file__).parent / "journal_v1.jsonl"
ENDINGS = {
    "work-2": ("failed", 2), "work-3": ("succeeded", 1), "train-4": ("succeeded", 2),
    "train-5": ("failed", 1), "train-6": ("succeeded", 1), "train-7": ("stopped", 0), "train-8": ("failed", 1),
}  # fmt: skip


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [decode_record(line) for line in GOLDEN.read_bytes().splitlines()]


def test_it_holds_every_kind_of_event(records: list[Record]) -> None:
    """A new kind of event needs a new golden journal beside this one; this one stays as it is."""
    assert {type(record.event) for record in records} == set(get_args(Event))


def test_its_state_is_what_it_was(records: list[Record]) -> None:
    state = fold(records)
    assert {run.id: (run.status, run.attempt) for run in state.runs.values()} == ENDINGS
    assert not state.leases


def test_what_it_says_is_still_said_in_the_same_words(records: list[Record]) -> None:
    for line, record in zip(GOLDEN.read_bytes().splitlines(), records, strict=True):
        assert encode_record(record) == line
