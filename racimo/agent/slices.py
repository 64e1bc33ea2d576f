"""Slices of trials on their way to workers and back: none runs twice, and no result is lost once its worker said it.

A worker writes each result into a file of its folder before it says it. So a result counts even if agent and worker die
together; what the file holds beyond what was told is told before the worker's exit.
"""

import os
from pathlib import Path

import msgspec

from racimo.agent.entry import Entry
from racimo.agent.frames import encode_frame
from racimo.agent.protocol import RunSlice, SliceDone
from racimo.agent.spool import Spool
from racimo.state.events import SliceEnded

RESULTS_FILE = "slices.jsonl"
MAX_TAIL_BYTES = 1 << 20
"""Of the file, from its end: a worker has at most one result that was not told."""

_DONE = msgspec.json.Decoder(SliceDone)


class Slices:
    """The newest slice of each live worker of this node."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._orders: dict[str, RunSlice] = {}
        self._told: dict[str, int] = {}
        """By worker, the number of the newest slice whose result is in the spool."""

    def order(self, entry: Entry, message: RunSlice) -> None:
        """Passes a slice on, unless it is known or over."""
        number = message.order.grant.number
        if number <= self._newest(entry):
            return
        self._orders[entry.name] = message
        entry.send(encode_frame(message))

    def connected(self, entry: Entry) -> None:
        """The worker is there (again): it is told what it may have missed."""
        message = self._orders.get(entry.name)
        if message is not None and message.order.grant.number > self._told.get(entry.name, -1):
            entry.send(encode_frame(message))

    def done(self, entry: Entry, message: SliceDone) -> None:
        """`OSError` if the disk does not take it; then the worker's file still has it."""
        if message.number <= self._told_of(entry):
            return
        self._spool.append(
            SliceEnded(
                run=entry.run, attempt=entry.attempt, index=entry.index, number=message.number, result=message.result
            )
        )
        self._told[entry.name] = message.number

    def ended(self, entry: Entry) -> None:
        """The worker has ended: what it wrote down and nobody was told is told now."""
        for message in _written(entry.directory):
            self.done(entry, message)
        self._orders.pop(entry.name, None)
        self._told.pop(entry.name, None)

    def _newest(self, entry: Entry) -> int:
        known = self._orders.get(entry.name)
        return max(known.order.grant.number if known is not None else -1, self._told_of(entry))

    def _told_of(self, entry: Entry) -> int:
        """What an earlier agent told is what is in the file: it was in the spool when the worker went on."""
        if entry.name not in self._told:
            pending = [
                event.number
                for event in self._spool.pending.values()
                if isinstance(event, SliceEnded) and (event.run, event.attempt, event.index) == _key(entry)
            ]
            self._told[entry.name] = max(pending, default=-1)
        return self._told[entry.name]


def _key(entry: Entry) -> tuple[str, int, int]:
    return entry.run, entry.attempt, entry.index


def _written(directory: Path) -> list[SliceDone]:
    """The results at the end of a worker's file, in order; a torn last line is none."""
    try:
        with open(directory / RESULTS_FILE, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    whole = lines[1:-1] if size > MAX_TAIL_BYTES else lines[:-1]
    return [_DONE.decode(line) for line in whole]
