"""At the end of what is paid for it a worker is ended by its agent, by nobody's leave."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from racimo.agent import prepaid
from racimo.agent.entry import Entry
from racimo.agent.prepaid import PAID_FILE, Prepaid
from racimo.agent.protocol import WorkerOrder

WAIT_S = 5.0


def entry_of(directory: Path, paid_s: float) -> Entry:
    return Entry(order=WorkerOrder(worker="study-1/1/0", kind="tune", paid_s=paid_s), directory=directory)


class Ends:
    """What was ended, when."""

    def __init__(self) -> None:
        self.at_s: dict[str, float] = {}
        self.news = asyncio.Event()

    def __call__(self, entry: Entry) -> None:
        self.at_s[entry.name] = time.monotonic() - entry.accepted_s
        self.news.set()

    async def wait(self) -> None:
        await asyncio.wait_for(self.news.wait(), WAIT_S)


@pytest.fixture(autouse=True)
def at_the_very_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepaid, "HARD_STOP_S", 0.0)


def play(body: Callable[[Ends, Prepaid], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        ends = Ends()
        await body(ends, Prepaid(lambda: "here", ends))

    asyncio.run(run())


def test_a_worker_is_ended_when_what_was_paid_is_used_up(tmp_path: Path) -> None:
    async def body(ends: Ends, paid: Prepaid) -> None:
        entry = entry_of(tmp_path, 0.05)
        paid.started(entry)
        await ends.wait()
        assert ends.at_s[entry.name] >= 0.05
        assert entry.doom is not None and entry.doom.code == "prepaid-over"

    play(body)


def test_a_slice_pays_for_more_and_a_later_smaller_one_takes_nothing_back(tmp_path: Path) -> None:
    async def body(ends: Ends, paid: Prepaid) -> None:
        entry = entry_of(tmp_path, 0.02)
        paid.started(entry)
        paid.extend(entry, 0.2)
        paid.extend(entry, 0.1)
        await ends.wait()
        assert ends.at_s[entry.name] >= 0.2

    play(body)


def test_the_next_agent_knows_what_was_paid(tmp_path: Path) -> None:
    async def body(ends: Ends, paid: Prepaid) -> None:
        entry = entry_of(tmp_path, 0.05)
        paid.started(entry)
        paid.extend(entry, 0.15)
        paid.ended(entry)  # as if this agent were gone
        Prepaid(lambda: "here", ends).adopted(entry)
        await ends.wait()
        assert ends.at_s[entry.name] >= 0.15

    play(body)


def test_what_was_noted_half_counts_as_what_the_order_said(tmp_path: Path) -> None:
    async def body(ends: Ends, paid: Prepaid) -> None:
        (tmp_path / PAID_FILE).write_text("12.")
        (tmp_path / PAID_FILE).write_text("nonsense")
        entry = entry_of(tmp_path, 0.05)
        paid.adopted(entry)
        await ends.wait()

    play(body)


def test_without_a_limit_and_after_its_end_there_is_no_timer(tmp_path: Path) -> None:
    async def body(ends: Ends, paid: Prepaid) -> None:
        free, limited = entry_of(tmp_path, 0.0), entry_of(tmp_path, 3_600.0)
        paid.started(free)
        paid.extend(free, 0.0)
        paid.started(limited)
        paid.ended(limited)
        assert not paid._timers and not ends.at_s

    play(body)
