"""What ends with a node's lease: whatever only its user understands, and nothing that is fenced by generations."""

import asyncio
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

from racimo.agent import processes
from racimo.agent.entry import Entry
from racimo.agent.protocol import Ready, WorkerOrder
from racimo.agent.workers import Workers
from racimo.state.nouns import Node


def running(worker: str) -> tuple[Entry, subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    entry = Entry(order=WorkerOrder(worker=worker, kind="train", rank=3), directory=Path("/nowhere"))
    entry.record = processes.ProcessRecord(
        pid=child.pid, start_ticks=processes.start_ticks(child.pid) or 0, boot=processes.boot_id(),
        monotonic_s=time.monotonic(),
    )  # fmt: skip
    return entry, child


def test_opaque_workers_are_killed_with_the_reason_and_exact_ones_live_on() -> None:
    async def check() -> None:
        (opaque, killed), (exact, lives) = running("r/1/0"), running("s/1/0")
        exact.ready = Ready(address="unix:/x", micro_shards=4, numerics="n")
        starting = Entry(order=WorkerOrder(worker="t/1/0", kind="command"), directory=Path("/nowhere"))
        starting.start_task = asyncio.create_task(asyncio.sleep(300))
        node = Node(id="n", host="alpha", devices=())
        workers = SimpleNamespace(live=[opaque, exact, starting], _node=node)
        try:
            for _ in range(2):
                Workers.end_opaque(workers, "no word from the control process for 10 m")  # type: ignore[arg-type]
            assert await asyncio.to_thread(killed.wait, 5) == -signal.SIGKILL
            assert lives.poll() is None
            assert opaque.doom is not None and exact.doom is None
            assert (opaque.doom.code, opaque.doom.rank) == ("node-lost", 3)
            assert opaque.doom.message == "r/1/0 was ended on alpha: no word from the control process for 10 m"
            await asyncio.gather(starting.start_task, return_exceptions=True)
            assert starting.start_task.cancelled() and starting.doom is not None
        finally:
            lives.kill()
            lives.wait()

    asyncio.run(check())
