"""A head without devices and two machines that joined it: `n2` with two devices and `n3` with one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from racimo.act.journal import Journal
from racimo.state.nouns import parse_worker_id
from tests.unit.carrier_stage import CarrierStage, LinkedAgent, carrier_stage
from tests.unit.control_stage import WAIT_S


class Nodes:
    """The stage and its two agents."""

    def __init__(self, stage: CarrierStage, n2: LinkedAgent, n3: LinkedAgent) -> None:
        self.stage, self.n2, self.n3 = stage, n2, n3

    async def submit(self, num_workers: int = 3, **fields: Any) -> str:
        """A command on all devices; returns once all its workers run."""
        run = str((await self.stage.submit("sleep", workers=num_workers, **fields))["id"])
        async with asyncio.timeout(WAIT_S):
            while True:
                pulse = self.stage.loop.pulse(run)
                live = self.stage.core.state.runs[run].live_workers
                if len(live) == num_workers and all(worker.pid is not None for worker in live):
                    return run
                await pulse.wait()

    def agent_of(self, worker: str) -> LinkedAgent:
        found = self.stage.core.state.worker(*parse_worker_id(worker))
        assert found is not None
        return {"n2": self.n2, "n3": self.n3}[found.node]

    def worker_on(self, run: str, node: str) -> str:
        """The first of the run's workers there."""
        workers = self.stage.core.state.runs[run].workers.values()
        return min(f"{run}/{worker.attempt}/{worker.index}" for worker in workers if worker.node == node)

    async def lines(self, run: str, **params: Any) -> list[dict[str, Any]]:
        answer = await self.stage.http.get(f"/v1/runs/{run}/logs", params=params)
        assert answer.status_code == 200, answer.text
        return [msgspec.json.decode(line) for line in answer.text.splitlines() if line]

    async def texts(self, run: str, **params: Any) -> list[str]:
        return [line["text"] for line in await self.lines(run, **params)]

    async def until_copied(self, worker: str, content: bytes, stream: str = "out") -> None:
        """Until the head has this as the end of that log."""
        async with asyncio.timeout(WAIT_S):
            while True:
                copies = self.stage.api.mirror.copies
                if copies.read(worker, stream, -len(content), len(content)).content == content:
                    return
                await asyncio.sleep(0.01)

    async def leave(self, agent: LinkedAgent) -> None:
        """The machine is gone."""
        await agent.die()
        async with asyncio.timeout(WAIT_S):
            while agent.node.id in self.stage.carrier.connected_nodes:
                await self.stage.carrier.nodes_changed.wait(WAIT_S)

    async def come_back(self, agent: LinkedAgent) -> None:
        await agent.listen()
        async with asyncio.timeout(WAIT_S):
            while agent.node.id not in self.stage.carrier.connected_nodes:
                await self.stage.carrier.nodes_changed.wait(WAIT_S)


@asynccontextmanager
async def nodes_stage(
    root: Path,
    journal: Journal | None = None,
    *,
    prices: tuple[float, float] = (0.0, 0.0),
    prepare: Callable[[LinkedAgent, LinkedAgent], None] = lambda n3, n2: None,
) -> AsyncIterator[Nodes]:
    """`prepare` is called before `n3` dials."""
    async with carrier_stage("link", root, journal) as made:
        assert isinstance(made.agent, LinkedAgent)
        n3 = LinkedAgent(made.home, made.bind, node="n3", num_slots=1)
        n3.node = msgspec.structs.replace(n3.node, price_per_device_hour=prices[1])
        prepare(n3, made.agent)
        await n3.listen()
        await made.until_nodes(n2="up", n3="up")
        async with asyncio.timeout(WAIT_S):
            while len(made.carrier.connected_nodes) < 3:
                await made.carrier.nodes_changed.wait(WAIT_S)
        if prices[0]:
            made.agent.node = msgspec.structs.replace(made.agent.node, price_per_device_hour=prices[0])
            await made.agent.cut()
            async with asyncio.timeout(WAIT_S):
                while made.core.state.nodes["n2"].price_per_device_hour != prices[0]:
                    await asyncio.sleep(0.01)
        mirror = asyncio.create_task(made.api.mirror.run(), name="mirror")
        try:
            yield Nodes(made, made.agent, n3)
            assert not mirror.done(), mirror
        finally:
            mirror.cancel()
            await asyncio.gather(mirror, return_exceptions=True)
            await n3.die()
