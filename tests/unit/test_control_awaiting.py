"""A run whose workers have devices and no process says on which host it waits, for what and since when."""

import asyncio
from types import SimpleNamespace
from typing import Any

from racimo.agent.protocol import UsageReply
from racimo.control.awaiting import starting_reason
from racimo.control.shipping import Transfer
from racimo.spec.run import RunSpec
from racimo.state.nouns import Node, Reason, Run, Worker

NODES = {name: Node(id=name, host=f"host-{name}", devices=()) for name in ("n1", "n2")}


def reason(run: Run, warnings: dict[str, tuple[str, ...]], on_its_way_to: str = "") -> Reason | None:
    async def request(node: str, body: Any) -> UsageReply:
        return UsageReply(processes=(), free_memory_bytes=1, free_disk_bytes=1, warnings=warnings.get(node, ()))

    transfer = Transfer(on_its_way_to, frozenset({"a", "b"}))
    shipping = SimpleNamespace(to=lambda node: transfer if node == on_its_way_to else None)
    carrier: Any = SimpleNamespace(connected_nodes=frozenset(NODES), request=request, shipping=shipping)
    return asyncio.run(starting_reason(run, NODES, carrier))


def run(pid_1: int | None, pid_2: int | None, status: Any = "running") -> Run:
    workers = {
        index: Worker(index=index, attempt=1, node=node, devices=(0,), rank=index, pid=pid)
        for index, (node, pid) in enumerate((("n1", pid_1), ("n2", pid_2)))
    }
    return Run(id="job-1", spec=RunSpec(train="t.py"), order=1, status=status, attempt=1, workers=workers)


def test_the_host_and_what_it_is_doing_are_named() -> None:
    building = "host-n2 has been building the environment ab12 for 12 s: Collecting torch"
    found = reason(run(7, None), {"n1": ("not asked",), "n2": (building, "importing torch")}, on_its_way_to="n2")
    assert found is not None and found.code == "workers-starting"
    assert found.text == (
        f"1 workers have no process yet: {building}; host-n2: importing torch; host-n2 has been getting 2 files for 0 s"
    )
    assert found.counts == {"workers": 1}


def test_a_run_that_runs_or_waits_for_devices_keeps_the_planners_words() -> None:
    assert reason(run(7, 8), {"n1": ("anything",)}) is None
    assert reason(run(None, None, status="queued"), {"n1": ("anything",)}) is None
    assert reason(run(None, None), {}) is None
