import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from control_stage import Stage, stage

from racimo.act.journal import MemoryJournal
from racimo.spec.errors import RacimoError
from racimo.spec.run import RunSpec


class SlowJournal(MemoryJournal):
    """Commits when it is let, and counts them; `full` makes them fail as on a full disk."""

    def __init__(self) -> None:
        super().__init__()
        self.may_commit = threading.Event()
        self.may_commit.set()
        self.num_commits = 0
        self.full = False

    def commit(self) -> None:
        assert self.may_commit.wait(10)
        if self.full:
            raise RacimoError("disk-full", "no space left")
        self.num_commits += 1
        super().commit()


def test_an_answer_waits_until_its_record_is_durable(tmp_path: Path) -> None:
    async def check() -> None:
        journal = SlowJournal()
        async with stage(tmp_path, journal) as made:
            journal.may_commit.clear()
            asking = asyncio.create_task(made.submit("x"))
            await asyncio.sleep(0.1)
            assert not asking.done() and made.agent.orders == [], "neither an answer nor an effect before the commit"
            journal.may_commit.set()
            run = (await asking)["id"]
            assert any(record.event.run == run for record in journal.records(run))  # type: ignore[union-attr]
            await made.until_started(run)

    asyncio.run(check())


def test_calls_that_come_together_share_commits(tmp_path: Path) -> None:
    async def check() -> None:
        journal = SlowJournal()
        async with stage(tmp_path, journal) as made:
            before = journal.num_commits
            await asyncio.gather(*(made.submit("x", request=str(number)) for number in range(200)))
            assert journal.num_commits - before < 60

    asyncio.run(check())


def test_a_full_disk_is_said_and_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        monkeypatch.setattr("racimo.control.loop.DISK_FULL_RETRY_S", 0.02)
        monkeypatch.setattr("racimo.control.carrier.DISK_FULL_PAUSE_S", 0.02)
        journal = SlowJournal()
        async with stage(tmp_path, journal) as made:
            run = (await made.submit("first"))["id"]
            worker = await made.until_started(run)
            journal.full = True
            body: dict[str, Any] = {"spec": {"command": ["x"]}, "request": "r"}
            for _ in range(2):
                answer = await made.http.post("/v1/runs", json=body)
                assert (answer.status_code, answer.json()["code"]) == (507, "disk-full")
            made.agent.exited(worker)
            assert len(made.agent.orders) == 1, "nothing is started that the journal does not know"
            warnings = (await made.http.get("/v1/cluster")).json()["warnings"]
            assert any("no space left" in warning for warning in warnings)
            assert (await made.http.get(f"/v1/runs/{run}")).status_code == 200, "reading goes on"
            journal.full = False
            await made.until(run, "succeeded")
            again = (await made.http.post("/v1/runs", json=body)).json()
            await made.until_started(again["id"])
            assert len((await made.http.get("/v1/runs")).json()) == 2, "the same request made one run"

    asyncio.run(check())


def test_too_many_waiting_calls_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        monkeypatch.setattr("racimo.control.loop.MAX_WAITING_CHANGES", 3)
        journal = SlowJournal()
        async with stage(tmp_path, journal) as made:
            journal.may_commit.clear()
            tasks = [asyncio.create_task(made.loop.change(_submit(number))) for number in range(8)]
            await asyncio.sleep(0.05)
            refused = [task for task in tasks if task.done()]
            assert refused and all(task.exception().code == "busy" for task in refused)  # type: ignore[union-attr]
            journal.may_commit.set()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(check())


def test_one_bad_change_does_not_hurt_its_neighbours(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:

            def bad(core: object) -> None:
                raise ZeroDivisionError

            good, broken = await asyncio.gather(
                made.loop.change(_submit(1)), made.loop.change(bad), return_exceptions=True
            )
            assert good.status in ("queued", "running")  # type: ignore[union-attr]
            assert isinstance(broken, ZeroDivisionError)

    asyncio.run(check())


def test_a_restarted_control_process_takes_up_what_runs_and_learns_what_ended(tmp_path: Path) -> None:
    """ray#65608: the head is replaced, exit 0 is recorded as failed."""

    async def check() -> None:
        journal = MemoryJournal()
        async with stage(tmp_path, journal) as made:
            ended, running = (await made.submit("a"))["id"], (await made.submit("b"))["id"]
            workers = [await made.until_started(run) for run in (ended, running)]
            agent = made.agent
        agent.exited(workers[0])  # while nobody listens
        async with stage(tmp_path, MemoryJournal(journal.disk)) as made:
            await made.agent.die()
            await agent.listen()
            try:
                assert (await made.until(ended, "succeeded", "failed", "lost"))["status"] == "succeeded"
                assert made.core.state.runs[running].status == "running"
                assert len(agent.orders) == 2, "nothing was started a second time"
            finally:
                await agent.die()
                await made.agent.listen()

    asyncio.run(check())


def test_an_agent_that_stays_away_makes_its_node_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        monkeypatch.setattr("racimo.control.carrier_silence.SILENT_AFTER_S", 0.05)
        async with stage(tmp_path) as made:
            await made.agent.die()
            await _until_node_is(made, "silent")
            await made.agent.listen()
            await _until_node_is(made, "up")

    asyncio.run(check())


async def _until_node_is(made: Stage, status: str) -> None:
    async with asyncio.timeout(5):
        while True:
            pulse = made.loop.pulse("")  # records of no run
            if made.core.state.nodes["n1"].status == status:
                return
            await pulse.wait()


def _submit(number: int) -> Any:
    return lambda core: core.submit(RunSpec(command=("x",)), str(number))


def test_an_ended_run_keeps_no_waiter(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as made:
            made.agent.script["hello",] = b""
            run = (await made.submit("hello"))["id"]
            await made.until(run, "succeeded")
            for path in ("wait", "events?follow=1", "logs?follow=1", "progress?follow=1"):
                async with asyncio.timeout(5):
                    assert (await made.http.get(f"/v1/runs/{run}/{path}")).status_code == 200
            assert run not in made.loop._pulses

    asyncio.run(check())
