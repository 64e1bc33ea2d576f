"""What every carrier must do, whether an agent is reached over its socket or dials from another machine."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from racimo.agent import protocol
from racimo.spec.errors import RacimoError
from racimo.state import events as ev
from tests.unit.carrier_stage import KINDS, CarrierStage, carrier_stage
from tests.unit.control_stage import WAIT_S

Check = Callable[[CarrierStage], Awaitable[None]]


@pytest.fixture(params=KINDS)
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Check], None]:
    async def go(check: Check) -> None:
        async with carrier_stage(request.param, tmp_path) as stage, asyncio.timeout(WAIT_S):
            await check(stage)

    return lambda check: asyncio.run(go(check))


async def _until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_a_run_is_started_and_its_end_recorded_once(play: Callable[[Check], None]) -> None:
    async def check(stage: CarrierStage) -> None:
        run = (await stage.submit("true"))["id"]
        worker = await stage.until_started(run)
        assert [order.worker for order in stage.agent.orders] == [worker]
        stage.agent.exited(worker)
        assert (await stage.until(run, "succeeded"))["status"] == "succeeded"
        assert stage.num_records(ev.WorkerExited, run) == 1

    play(check)


def test_orders_to_one_worker_arrive_as_they_were_decided(play: Callable[[Check], None]) -> None:
    async def check(stage: CarrierStage) -> None:
        run = (await stage.submit("sleep", "9"))["id"]
        worker = await stage.until_started(run)
        for _ in range(10):
            await stage.http.post(f"/v1/runs/{run}/pause")
            await stage.http.post(f"/v1/runs/{run}/resume")
        await stage.http.post(f"/v1/runs/{run}/stop")
        await stage.until(run, "stopped")
        told = [one.how for one in stage.agent.told if isinstance(one, protocol.StopWorker) and one.worker == worker]
        ends = told.index("stop")
        assert told[:ends] == ["pause", "thaw"] * (ends // 2), told
        assert ends >= 2

    play(check)


def test_events_count_once_however_often_the_connection_breaks(play: Callable[[Check], None]) -> None:
    async def check(stage: CarrierStage) -> None:
        runs = [(await stage.submit("true"))["id"] for _ in range(2)]
        workers = [await stage.until_started(run) for run in runs]
        for worker in workers:
            stage.agent.exited(worker)
            await stage.disconnect()
        for run in runs:
            await stage.until(run, "succeeded")
            assert stage.num_records(ev.WorkerStarted, run) == 1
            assert stage.num_records(ev.WorkerExited, run) == 1

    play(check)


def test_what_a_broken_connection_cut_off_comes_again(play: Callable[[Check], None]) -> None:
    async def check(stage: CarrierStage) -> None:
        await stage.disconnect()
        run = (await stage.submit("true"))["id"]
        await stage.disconnect()
        worker = await stage.until_started(run)
        assert len({order.worker for order in stage.agent.orders}) == 1
        stage.agent.exited(worker)
        await stage.until(run, "succeeded")

    play(check)


def test_a_worker_that_does_not_belong_is_ended_when_its_agent_comes_back(play: Callable[[Check], None]) -> None:
    async def check(stage: CarrierStage) -> None:
        stage.agent.live["ghost-7/1/0"] = 4711
        await stage.disconnect()
        stray = protocol.StopWorker(worker="ghost-7/1/0", how="abort")
        await _until(lambda: stray in stage.agent.told)

    play(check)


def test_a_worker_that_its_agent_has_lost_counts_as_lost(play: Callable[[Check], None]) -> None:
    async def check(stage: CarrierStage) -> None:
        run = (await stage.submit("sleep", "9"))["id"]
        worker = await stage.until_started(run)
        stage.agent.live.pop(worker)
        await stage.disconnect()
        assert (await stage.until(run, "lost"))["failure"]["code"] == "worker-lost"

    play(check)


def test_contents_that_a_node_misses_are_sent_before_the_worker_starts(play: Callable[[Check], None]) -> None:
    async def check(stage: CarrierStage) -> None:
        content = b"print('hello')\n"
        sha256 = hashlib.sha256(content).hexdigest()
        body = {"files": [{"path": "a.py", "mode": 0o644, "size_bytes": len(content), "sha256": sha256}]}
        made = (await stage.http.post("/v1/snapshots", json=body)).json()
        if made["missing"]:
            await stage.http.put(f"/v1/blobs/{sha256}", content=content)
            made = (await stage.http.post("/v1/snapshots", json=body)).json()
        run = (await stage.submit("python", "a.py", snapshot=made["id"]))["id"]
        await stage.until_started(run)
        assert stage.agent.blobs == {sha256: content}

    play(check)


def test_a_refused_order_fails_its_run_with_the_agent_s_words(play: Callable[[Check], None]) -> None:
    async def check(stage: CarrierStage) -> None:
        stage.agent.refuse_start = protocol.Refused(code="disk-full", message="the disk of here is full")
        run = await stage.until((await stage.submit("true"))["id"], "failed")
        assert run["failure"]["code"] == "disk-full"
        assert "the disk of here is full" in run["failure"]["message"]

    play(check)


def test_a_busy_agent_is_asked_again(play: Callable[[Check], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("racimo.control.carrier_channel.BUSY_PAUSE_S", 0.01)

    async def check(stage: CarrierStage) -> None:
        stage.agent.refuse_start = protocol.Refused(code="busy", message="256 requests are in flight")
        run = (await stage.submit("true"))["id"]
        await asyncio.sleep(0.05)
        assert stage.core.state.runs[run].status == "running" and not stage.agent.orders
        stage.agent.refuse_start = None
        await stage.until_started(run)

    play(check)


def test_a_request_for_a_node_that_is_away_says_so(
    play: Callable[[Check], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("racimo.control.carrier_channel.CONNECTION_WAIT_S", 0.05)

    async def check(stage: CarrierStage) -> None:
        node = stage.agent.node.id
        assert node in stage.carrier.connected_nodes
        await stage.agent.die()
        await _until(lambda: node not in stage.carrier.connected_nodes)
        with pytest.raises(RacimoError) as caught:
            await stage.carrier.request(node, protocol.Usage())
        assert caught.value.code == "unreachable" and node in caught.value.message
        with pytest.raises(RacimoError) as caught:
            await stage.carrier.request("nobody", protocol.Usage())
        assert caught.value.code == "node-unknown"

    play(check)


def test_an_agent_that_stays_away_makes_its_node_silent_until_it_is_back(
    play: Callable[[Check], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("racimo.control.carrier_silence.SILENT_AFTER_S", 0.2)

    async def check(stage: CarrierStage) -> None:
        run = (await stage.submit("sleep", "9"))["id"]
        worker = await stage.until_started(run)
        node = stage.agent.node.id
        await stage.agent.die()
        await stage.until_nodes(**{node: "silent"})
        await stage.agent.listen()
        await stage.until_nodes(**{node: "up"})
        stage.agent.exited(worker)
        await stage.until(run, "succeeded")
        assert stage.num_records(ev.WorkerStarted, run) == 1

    play(check)
