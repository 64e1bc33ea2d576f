"""Questions for a proposing process on their way through its agent."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from racimo.agent.entry import Entry
from racimo.agent.frames import FrameBuffer
from racimo.agent.propose_protocol import AskProposer, Proposed, ProposerAsk
from racimo.agent.proposers import Proposers
from racimo.agent.protocol import WorkerOrder
from racimo.spec.errors import RacimoError
from racimo.state.nouns import Exit

NAME = "r/1/1000007"


class Wire:
    """The worker's side of its connection."""

    def __init__(self) -> None:
        self.sent = bytearray()

    def write(self, frame: bytes) -> None:
        self.sent += frame

    def is_closing(self) -> bool:
        return False

    @property
    def numbers(self) -> list[int]:
        return [msgspec.msgpack.decode(body, type=ProposerAsk).number for body in FrameBuffer().feed(bytes(self.sent))]


def made() -> tuple[Proposers, Entry]:
    entry = Entry(order=WorkerOrder(worker=NAME, kind="exec"), directory=Path("/nowhere"))
    workers: Any = SimpleNamespace(entries={NAME: entry})
    return Proposers(workers), entry


def asked(number: int) -> AskProposer:
    return AskProposer(worker=NAME, ask=ProposerAsk(number=number, first=0, count=1, seed=0))


async def begun(proposers: Proposers, number: int) -> asyncio.Task[Proposed]:
    task = asyncio.create_task(proposers.ask(asked(number)))
    await asyncio.sleep(0)
    return task


def test_a_question_waits_until_its_process_connects_and_is_answered_by_number() -> None:
    async def check() -> None:
        proposers, entry = made()
        task = await begun(proposers, 5)
        wire: Any = Wire()
        entry.writer = wire
        proposers.connected(entry)
        proposers.said(NAME, Proposed(number=4))
        await asyncio.sleep(0)
        assert wire.numbers == [5] and not task.done()
        proposers.said(NAME, Proposed(number=5))
        assert await task == Proposed(number=5)
        proposers.said(NAME, Proposed(number=5))  # nobody waits any more
        proposers.connected(entry)
        assert wire.numbers == [5]

    asyncio.run(check())


def test_a_process_that_ends_leaves_no_question_open() -> None:
    async def check() -> None:
        proposers, entry = made()
        task = await begun(proposers, 1)
        entry.exit = Exit(outcome="killed", signal=9)
        for follower in entry.followers:
            follower.beat()
        with pytest.raises(RacimoError) as caught:
            await task
        assert caught.value.code == "not-found" and not entry.followers
        with pytest.raises(RacimoError, match="does not live here"):
            await proposers.ask(asked(2))

    asyncio.run(check())


def test_a_new_question_takes_the_place_of_one_whose_asker_is_gone() -> None:
    async def check() -> None:
        proposers, entry = made()
        wire: Any = Wire()
        entry.writer = wire
        first, second = await begun(proposers, 1), await begun(proposers, 2)
        with pytest.raises(RacimoError) as caught:
            await first
        assert caught.value.code == "wrong-state"
        proposers.said(NAME, Proposed(number=2))
        assert (await second).number == 2

    asyncio.run(check())
