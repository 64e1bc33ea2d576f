"""Journals that earlier versions wrote stay readable, and mean what they meant."""

from pathlib import Path
from typing import get_args

import pytest

from racimo.act.records import decode_record, encode_record
from racimo.state import events as ev
from racimo.state.events import Event, Record
from racimo.state.fold import State, fold

SINCE_2 = {
    ev.NodeStuck, ev.DrainRequested, ev.NodeForgotten, ev.PairUnreachable, ev.NodeLost, ev.WorkersLost,
}  # fmt: skip
"""Kinds of events that came with clusters of several nodes."""
SINCE_3 = {ev.TrialsProposed, ev.StudyChanged, ev.SliceGranted, ev.SliceEnded, ev.TrialEnded}
"""Kinds of events that came with tuning."""
ENDINGS = {
    1: {
        "work-2": ("failed", 2), "work-3": ("succeeded", 1), "train-4": ("succeeded", 2),
        "train-5": ("failed", 1), "train-6": ("succeeded", 1), "train-7": ("stopped", 0), "train-8": ("failed", 1),
    },
    2: {"work-2": ("succeeded", 2), "train-3": ("failed", 1), "work-4": ("lost", 1), "work-5": ("stopped", 1)},
    3: {"t-1": ("succeeded", 2), "t-2": ("stopped", 1)},
}  # fmt: skip
NEWEST = max(ENDINGS)


def lines(version: int) -> list[bytes]:
    return (Path(__file__).parent / f"journal_v{version}.jsonl").read_bytes().splitlines()


def records(version: int) -> list[Record]:
    return [decode_record(line) for line in lines(version)]


def test_they_hold_every_kind_of_event() -> None:
    """A new kind of event needs a new golden journal beside these; these stay as they are."""
    assert {type(record.event) for record in records(1)} == set(get_args(Event)) - SINCE_2 - SINCE_3
    assert {type(record.event) for record in records(2)} == set(get_args(Event)) - SINCE_3
    assert {type(record.event) for record in records(3)} >= SINCE_3


@pytest.mark.parametrize("version", ENDINGS)
def test_their_state_is_what_it_was(version: int) -> None:
    state = fold(records(version))
    assert {run.id: (run.status, run.attempt) for run in state.runs.values()} == ENDINGS[version]
    assert not state.leases and not state.on_node
    assert State.from_bytes(state.to_bytes()) == state


def test_what_happened_to_machines_is_what_it_was() -> None:
    state = fold(records(2))
    assert {node.id: (node.status, node.draining) for node in state.nodes.values()} == {
        "n2": ("up", False),
        "n3": ("up", False),
    }
    assert state.forgotten == {"train-1": ("n1", "n2", "n3")}


def test_what_became_of_trials_is_what_it_was() -> None:
    study = fold(records(3)).studies["t-1"]
    assert study.counts == {"finished": 5, "stopped": 2, "diverged": 1, "failed": 1}
    assert study.best is not None and study.best.number == 0


@pytest.mark.parametrize("version", ENDINGS)
def test_what_they_say_is_still_said_in_the_same_words(version: int) -> None:
    """Older ones with what nodes have got since; the newest to the letter."""
    for line, record in zip(lines(version), records(version), strict=True):
        assert decode_record(encode_record(record)) == record
        if version == NEWEST or not isinstance(record.event, ev.NodeJoined):
            assert encode_record(record) == line
