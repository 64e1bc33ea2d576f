"""What the agent looks at while workers live, and only then: their memory, their logs' size, their phases."""

import asyncio
import signal
import sys
import time

from racimo.agent import processes
from racimo.agent.entry import Entry
from racimo.agent.hangs import describe_hang, find_hung, note_phases
from racimo.agent.inotify import FileWatcher
from racimo.agent.logs import cap_logs
from racimo.agent.runs import Runs
from racimo.agent.spool import Spool
from racimo.agent.stopping import signal_worker
from racimo.agent.workers import Workers
from racimo.spec.home import Home
from racimo.spec.quantity import format_size
from racimo.state.events import WorkerHung
from racimo.state.nouns import Failure

TICK_S = 0.25
TICKS_PER_HANG_CHECK = 4
TICKS_PER_LOG_CHECK = 8
MIN_FREE_MEMORY_FRACTION = 0.03
"""Below this the largest worker is ended, before the kernel picks a victim of its own."""
MAX_TREE_PROCESSES = 10_000
IDLE_WAIT_S = 3600.0


class Watch:
    """One task of the agent; asleep while there is no worker."""

    def __init__(self, home: Home, host: str, workers: Workers, runs: Runs, spool: Spool, files: FileWatcher) -> None:
        self._home, self._host = home, host
        self._workers, self._runs, self._spool, self._files = workers, runs, spool, files
        self._hangs: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._run(), name="watch")

    async def close(self) -> None:
        for task in (self._task, *self._hangs):
            task.cancel()
        await asyncio.gather(self._task, *self._hangs, return_exceptions=True)

    async def _run(self) -> None:
        tick = 0
        while True:
            live = self._workers.live
            if not live:
                await self._workers.started.wait(IDLE_WAIT_S)
                continue
            await asyncio.sleep(TICK_S)
            tick += 1
            try:
                self._check_limits(live)
                self._check_node_memory(live)
                if tick % TICKS_PER_HANG_CHECK == 0:
                    self._check_hangs(live)
                if tick % TICKS_PER_LOG_CHECK == 0:
                    self._check_logs(live)
            except OSError as error:
                print(f"agent: watching failed this time: {error}", file=sys.stderr)
            except Exception as error:  # noqa: BLE001 - a fault of ours about one worker must not end the watch over all
                sys.excepthook(type(error), error, error.__traceback__)

    def _check_limits(self, live: list[Entry]) -> None:
        for entry in live:
            limit = entry.order.memory_bytes
            if limit is None or entry.record is None or entry.doom is not None:
                continue
            held = tree_private_bytes(entry.record.pid)
            if held > limit:
                message = f"{entry.name} held {format_size(held)} of memory, its limit is {format_size(limit)}"
                self._end_for_memory(entry, message, "raise it with --memory")

    def _check_node_memory(self, live: list[Entry]) -> None:
        free, total = processes.memory_bytes()
        if free >= total * MIN_FREE_MEMORY_FRACTION:
            return
        candidates = [entry for entry in live if entry.record is not None and entry.doom is None]
        if len(candidates) < sum(entry.record is not None for entry in live):
            return  # one is being ended already: see what that frees
        sizes = [(tree_private_bytes(entry.record.pid), entry) for entry in candidates if entry.record is not None]
        if not sizes:
            return
        held, entry = max(sizes, key=lambda item: item[0])
        message = (
            f"{self._host} had {format_size(free)} of {format_size(total)} memory free; "
            f"{entry.name} held the most, {format_size(held)}, and was ended"
        )
        self._end_for_memory(entry, message, "give the run fewer workers, or each a limit with --memory")

    def _end_for_memory(self, entry: Entry, message: str, hint: str) -> None:
        assert entry.record is not None
        entry.doom = Failure(code="out-of-memory", message=message, hint=hint, rank=entry.order.rank, worker=entry.name)
        signal_worker(entry, signal.SIGKILL)

    def _check_logs(self, live: list[Entry]) -> None:
        for entry in live:
            cap_logs(entry.directory)

    def _check_hangs(self, live: list[Entry]) -> None:
        now_s = time.monotonic()
        note_phases(live, now_s)
        for run in {entry.run for entry in live}:
            for entry in find_hung(self._workers.of_run(run), now_s):
                assert entry.progress is not None
                entry.hung_phase = entry.progress.phase_number
                task = asyncio.create_task(self._report_hang(entry), name=f"hang {entry.name}")
                self._hangs.add(task)
                task.add_done_callback(lambda task, entry=entry: self._hang_reported(task, entry))  # type: ignore[misc]

    def _hang_reported(self, task: asyncio.Task[None], entry: Entry) -> None:
        """A fault of ours in looking at a hang is shown, and the hang is looked at again."""
        self._hangs.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            sys.excepthook(type(error), error, error.__traceback__)
            entry.hung_phase = None

    async def _report_hang(self, entry: Entry) -> None:
        cwd = self._home.attempt_files_dir(entry.run, entry.attempt)
        phase_number = entry.hung_phase
        peers = [peer for peer in self._workers.of_run(entry.run) if peer.attempt == entry.attempt]
        failure = await describe_hang(entry, peers, self._runs.generation(entry.run), self._files, cwd)
        went_on = entry.progress is None or entry.progress.phase_number != phase_number
        if entry.live and not went_on:
            self._spool.append(WorkerHung(run=entry.run, attempt=entry.attempt, index=entry.index, failure=failure))


def tree_private_bytes(pid: int) -> int:
    """Private memory of a process and everything below it."""
    total, pending, seen = 0, [pid], 0
    while pending and seen < MAX_TREE_PROCESSES:
        current = pending.pop()
        seen += 1
        total += processes.private_bytes(current) or 0
        pending += processes.children_of(current)
    return total
