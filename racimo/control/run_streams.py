"""What goes on with a run, as it happens: its records, its progress, and a command beside one of its workers."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from racimo.agent.protocol import WorkerOrder
from racimo.control import present
from racimo.control.carrier import Carrier
from racimo.control.log_source import Place
from racimo.control.log_streams import LogStreams
from racimo.control.loop import Loop
from racimo.control.progress import ProgressBoard
from racimo.control.views import EndedView, ExecExitView, RunProgress
from racimo.state.nouns import Run

EXEC_EXIT_WAIT_S = 10.0


class RunStreams:
    """Each method is one stream; lines of logs are in `log_streams`."""

    def __init__(self, loop: Loop, carrier: Carrier, board: ProgressBoard, logs: LogStreams) -> None:
        self._loop, self._carrier, self._board, self._logs = loop, carrier, board, logs

    def progress_of(self, run: Run) -> RunProgress:
        core = self._loop.core
        return present.run_progress(core.state, run, self._board.of_run(run.id), core.clock.now_s())

    async def events(self, run: str, follow: bool) -> AsyncGenerator[Any, None]:
        """The journal's records; `EndedView` last, once the run has ended."""
        runs = self._loop.core.state.runs
        seq = 0
        while True:
            pulse = self._loop.pulse(run)
            ended = runs[run].ended
            records = await self._loop.records(run, seq)
            if records:
                seq = records[-1].seq
                yield records
            if ended or not follow:
                break
            await pulse.wait()
        if runs[run].ended:
            yield EndedView(ended=runs[run].status)

    async def progress(self, run: str, follow: bool) -> AsyncGenerator[RunProgress, None]:
        """The run as it is now; with `follow` whenever that changes, until it has ended."""
        runs = self._loop.core.state.runs
        await self._board.refresh([runs[run]])
        if follow:
            last: RunProgress | None = None
            async with contextlib.aclosing(self._board.changes(self._loop, run)) as changes:
                async for _ in changes:
                    found = runs[run]
                    if found.ended:
                        break
                    view = self.progress_of(found)
                    if last is None or msgspec.structs.replace(view, cost=last.cost) != last:
                        last = view
                        yield view
        await self._board.recall([runs[run]])
        yield self.progress_of(runs[run])

    async def exec(self, node: str, order: WorkerOrder) -> AsyncGenerator[Any, None]:
        """The command's lines, and its `ExecExitView` last. `RacimoError` unreachable if the node is away."""
        place = Place.of(order.worker, node)
        try:
            exit_ = asyncio.ensure_future(await self._carrier.start_exec(node, order))
            async with contextlib.aclosing(self._logs.of_exec(place, exit_.done)) as several:
                async for lines in several:
                    yield lines
            async with asyncio.timeout(EXEC_EXIT_WAIT_S):
                yield ExecExitView(exit=await exit_)
        finally:
            await self._carrier.forget_exec(node, order.worker)
