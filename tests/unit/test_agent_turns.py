"""A worker starts on a device only once nobody else is on it, whoever that may be."""

import asyncio
from pathlib import Path

import pytest

from racimo.agent.entry import Entry
from racimo.agent.protocol import WorkerOrder
from racimo.agent.pulse import Pulse
from racimo.agent.turns import await_turn, strays
from racimo.spec.errors import RacimoError
from racimo.state.nouns import Exit


def entry(worker: str, *devices: int, exec_of: str = "") -> Entry:
    kind = "exec" if exec_of else "command"
    order = WorkerOrder(worker=worker, kind=kind, devices=devices, exec_of=exec_of)  # type: ignore[arg-type]
    return Entry(order=order, directory=Path("/nowhere"))


def names(*entries: Entry) -> list[str]:
    """Who is in the way of the last."""
    return [other.name for other in strays({one.name: one for one in entries}, entries[-1])]


def test_who_holds_one_of_its_devices_or_is_of_an_older_attempt_is_in_the_way() -> None:
    ended = entry("c/1/0", 2)
    ended.exit = Exit(outcome="finished")
    others = (entry("a/1/0", 0, 1), entry("b/1/0", 3), entry("r/1/0", 4), entry("r/2/1", 5), ended)
    assert names(*others, entry("r/2/0", 1, 2)) == ["a/1/0", "r/1/0"]


def test_an_exec_command_holds_nothing_and_waits_for_nobody() -> None:
    assert names(entry("a/1/1000000", 0, exec_of="a/1/0"), entry("b/1/0", 0)) == []
    assert names(entry("a/1/0", 0), entry("a/1/1000000", 0, exec_of="a/1/0")) == []


def test_two_orders_for_a_device_do_not_wait_for_each_other() -> None:
    first, second = entry("a/1/0", 0), entry("b/1/0", 0)
    entries = {one.name: one for one in (first, second)}
    assert strays(entries, first) == [] and strays(entries, second) == [first]


def test_the_start_waits_until_the_stray_has_ended() -> None:
    """ray#41437: what was given up must not be on a device beside what came after it."""

    async def check() -> None:
        stray, fresh, ended = entry("r/1/0", 0), entry("r/2/0", 0), Pulse()
        entries = {one.name: one for one in (stray, fresh)}
        waiting = asyncio.create_task(await_turn(entries, fresh, ended, 30.0))
        await asyncio.sleep(0)
        ended.beat()  # somebody else's end
        await asyncio.sleep(0)
        assert not waiting.done()
        stray.exit = Exit(outcome="killed", signal=9)
        ended.beat()
        async with asyncio.timeout(5):
            await waiting

    asyncio.run(check())


def test_a_stray_that_does_not_end_is_named() -> None:
    async def check() -> None:
        stray, fresh = entry("r/1/0", 0), entry("s/1/0", 0)
        with pytest.raises(RacimoError) as caught:
            await await_turn({one.name: one for one in (stray, fresh)}, fresh, Pulse(), 0.01)
        assert caught.value.code == "wrong-state"
        assert caught.value.message == "s/1/0 cannot start: r/1/0 did not end within 0.01 s"

    asyncio.run(check())
