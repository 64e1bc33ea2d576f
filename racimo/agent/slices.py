"""Slices of trials on their way to workers and back: none runs twice, and no result is lost once its worker said it.

A worker writes each result into a file of its folder before it says it. So a result counts even if agent and worker die
together: what the file holds beyond what was told is told before the worker's exit. Only its last line can be that: a
worker gets another slice once the result before is in the journal.
"""

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from racimo.agent.entry import Entry
from racimo.agent.frames import encode_frame
from racimo.agent.protocol import RunSlice, SliceDone, SliceOrder
from racimo.agent.spool import Spool
from racimo.agent.states import States
from racimo.state.events import SliceEnded
from racimo.state.trials import Result

RESULTS_FILE = "slices.jsonl"
BEGUN_FILE = "slice-begun"
"""The number of the newest slice that the worker has begun."""
MAX_TAIL_BYTES = 1 << 20
"""Of the file, from its end."""

_DONE = msgspec.json.Decoder(SliceDone)


class Slices:
    """The newest slice of each live worker of this node. `states` brings what a slice goes on from."""

    def __init__(self, spool: Spool, states: States) -> None:
        self._spool, self._states = spool, states
        self._orders: dict[str, RunSlice] = {}
        self._ready: dict[str, int] = {}
        """By worker, the number of the newest slice whose state is here."""
        self._told: dict[str, int] = {}
        """By worker, the number of the newest slice whose result is in the spool."""
        self._bringing: set[asyncio.Task[None]] = set()

    def order(self, entry: Entry, message: RunSlice) -> None:
        """Passes a slice on once its trial's state is here, unless it is known or over."""
        number = message.order.grant.number
        if number <= self._newest(entry):
            return
        self._orders[entry.name] = message
        if self._states.is_here(entry.run, message.order):
            self._pass_on(entry, message)
            return
        task = asyncio.create_task(self._bring(entry, message), name=f"state for {entry.name}")
        self._bringing.add(task)
        task.add_done_callback(self._bringing.discard)

    def connected(self, entry: Entry) -> None:
        """The worker is there (again): it is told what it may have missed."""
        message = self._orders.get(entry.name)
        number = message.order.grant.number if message is not None else -1
        if message is not None and number > self._told_of(entry) and number <= self._ready.get(entry.name, -1):
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
        """The worker has ended: what it wrote down and nobody was told is told now. A slice that it was given and did
        not begin goes back as it was: its trial was not tried."""
        written = newest_result(entry.directory)
        if written is not None:
            self.done(entry, written)
        given = self._orders.get(entry.name)
        if given is not None and given.order.grant.number > newest_begun(entry.directory):
            self.done(entry, given_back(given.order))
        self._orders.pop(entry.name, None)
        self._told.pop(entry.name, None)
        self._ready.pop(entry.name, None)

    def close(self) -> None:
        for task in self._bringing:
            task.cancel()

    async def _bring(self, entry: Entry, message: RunSlice) -> None:
        try:
            await self._states.bring(entry.run, message.order)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not keep the trial from going on
            print(f"agent: the state of trial {message.order.grant.trial} of {entry.run}: {error!r}", file=sys.stderr)
        if entry.live and self._orders.get(entry.name) is message:
            self._pass_on(entry, message)

    def _pass_on(self, entry: Entry, message: RunSlice) -> None:
        self._ready[entry.name] = message.order.grant.number
        entry.send(encode_frame(message))

    def _newest(self, entry: Entry) -> int:
        known = self._orders.get(entry.name)
        return max(known.order.grant.number if known is not None else -1, self._told_of(entry))

    def _told_of(self, entry: Entry) -> int:
        """What an earlier agent told and is not acknowledged is in the spool. What was acknowledged since may be told
        again, which control knows by its number."""
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


def given_back(order: SliceOrder) -> SliceDone:
    """Of a slice that was not begun."""
    result = Result(outcome="halted", rounds=order.rounds, step=order.step, saved=order.saved)
    return SliceDone(number=order.grant.number, result=result)


def note_begun(directory: Path, number: int) -> None:
    """The worker begins this slice."""
    fd = os.open(directory / BEGUN_FILE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, b"%20d" % number, 0)
    finally:
        os.close(fd)


def newest_begun(directory: Path) -> int:
    """The newest slice that the worker has begun; -1 before the first."""
    try:
        return int((directory / BEGUN_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return -1


def newest_result(directory: Path) -> SliceDone | None:
    """The last whole line of a worker's file; one that a kill has torn is none."""
    try:
        with open(directory / RESULTS_FILE, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return None
    for line in reversed(lines[:-1]):
        try:
            return _DONE.decode(line)
        except msgspec.DecodeError:
            continue  # what a kill cut off, and another process of the worker has gone on behind
    return None
