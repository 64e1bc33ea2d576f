"""The head's own copy of the last MB of each log on other nodes, for the day when such a node does not answer.

Reports are copied on the same occasion. Copies are kept as long as the run is (kuberay#1047, ray#44561: logs and
history are gone after the head restarts). The files have holes where nothing is kept, so that a byte has the same
offset as in the worker's own log.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from racimo.agent.logs import BLOCK_BYTES, enforce_cap, notice_over, read_log
from racimo.agent.protocol import LogBatch, LogChunk, LogPiece, PullLogs
from racimo.control.carrier import Carrier
from racimo.control.reports import ReportBoard
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.state.fold import State
from racimo.state.nouns import parse_worker_id

CAP_BYTES = 1_400_000
"""Of one copy; a quarter is dropped at a time, so that the last MB is always there."""
MAX_TOTAL_BYTES = 4 * 2**30
"""Of all copies; beyond it those of the oldest runs that have ended go first, then any."""
PULL_WAIT_S = 60.0
PULL_BYTES = 2 * 2**20
MIN_INTERVAL_S = 0.25
BUSY_INTERVAL_S = 1.0
"""Between pulls that came full: so logs never take more than `PULL_BYTES` per second and node of the head's link."""
BUSY_NODES = 10
"""With more of them the pauses are longer: all together take no more than these would."""
RETRY_S = 1.0
REFUSED_S = 60.0
MAX_WRITING = 4
NODES_LOOK_S = 60.0

log = logging.getLogger("racimo.control.mirror")


class LogCopies:
    """The files. Everything here blocks on the disk."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def has(self, worker: str) -> bool:
        return (self._root / worker).is_dir()

    def read(self, worker: str, stream: str, offset: int, limit: int) -> LogChunk:
        """As an agent's `ReadLog` would answer; never `ended`, as nobody knows what was not sent any more."""
        begin, content = read_log(self._root / worker / f"{stream}.log", offset, limit)
        return LogChunk(offset=begin, content=content, ended=False)

    def write(self, piece: LogPiece) -> None:
        """Puts a piece where it belongs. `OSError` if the disk does not take it."""
        folder = self._root / piece.worker
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"{piece.stream}.log"
        content = piece.content
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size_bytes = os.fstat(fd).st_size
            if piece.offset > size_bytes:
                # What came before is older than the last MB, and what lies between was never sent.
                os.ftruncate(fd, 0)
                notice = notice_over(content[:BLOCK_BYTES], piece.offset)
                content = notice + content[len(notice) :]
            os.pwrite(fd, content, piece.offset)
        finally:
            os.close(fd)
        try:
            enforce_cap(path, CAP_BYTES)
        except OSError:  # this file system punches no holes: the bound holds all the same
            path.unlink(missing_ok=True)
            raise

    def forget_all_but(self, kept: Callable[[str], bool], ended: list[str]) -> None:
        """Drops the copies of runs that are not `kept`, then, beyond `MAX_TOTAL_BYTES`, those of `ended` in turn."""
        sizes: dict[str, int] = {}
        for folder in self._root.iterdir() if self._root.is_dir() else ():
            if kept(folder.name):
                sizes[folder.name] = sum(path.stat().st_blocks * 512 for path in folder.rglob("*.log"))
            else:
                shutil.rmtree(folder, ignore_errors=True)
        total_bytes = sum(sizes.values())
        for run in ended:
            if total_bytes <= MAX_TOTAL_BYTES:
                break
            if run in sizes:
                shutil.rmtree(self._root / run, ignore_errors=True)
                total_bytes -= sizes[run]


class Mirror:
    """One task for each node on another machine; nothing is done while nothing is written there."""

    def __init__(self, home: Home, carrier: Carrier, reports: ReportBoard, state: Callable[[], State]) -> None:
        self.copies = LogCopies(home.mirrored_logs_dir)
        self._carrier, self._reports, self._state = carrier, reports, state
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cursors: dict[str, int] = {}
        """How far each node's agent was heard in this process's life."""
        self._known_runs: set[str] = set()
        self._busy: frozenset[str] = frozenset()
        """Nodes whose last batch came full."""
        self._writing = asyncio.Semaphore(MAX_WRITING)

    async def run(self) -> None:
        """For ever: follows whoever is connected."""
        await self._forget()
        try:
            while True:
                self._follow(self._carrier.connected_nodes - {self._carrier.local_node})
                await self._carrier.nodes_changed.wait(NODES_LOOK_S)
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _follow(self, nodes: frozenset[str]) -> None:
        for node in [node for node, task in self._tasks.items() if node not in nodes or task.done()]:
            self._tasks.pop(node).cancel()
        for node in nodes - set(self._tasks):
            self._tasks[node] = asyncio.create_task(self._pull_from(node), name=f"logs of {node}")

    async def _pull_from(self, node: str) -> None:
        """Until it is cancelled, because the node is gone."""
        while True:
            began_s = time.monotonic()
            interval_s = MIN_INTERVAL_S
            try:
                busy = await self._pull_once(node)
                self._busy = self._busy | {node} if busy else self._busy - {node}
                if busy:
                    interval_s = BUSY_INTERVAL_S * max(1.0, len(self._busy) / BUSY_NODES)
            except RacimoError as error:
                interval_s = RETRY_S
                if error.code not in ("unreachable", "node-unknown"):
                    log.warning("node %s does not send its logs: %s", node, error.message)
                    interval_s = REFUSED_S
            await asyncio.sleep(max(0.0, began_s + interval_s - time.monotonic()))

    async def _pull_once(self, node: str) -> bool:
        """True if there is more at once."""
        request = PullLogs(after=self._cursors.get(node, 0), wait_s=PULL_WAIT_S, limit_bytes=PULL_BYTES)
        batch = await self._carrier.request(node, request)
        assert isinstance(batch, LogBatch)
        runs = self._state().runs
        # A run's name becomes a folder's, so it is one that this cluster gave.
        pieces = [piece for piece in batch.pieces if parse_worker_id(piece.worker)[0] in runs]
        new = {parse_worker_id(piece.worker)[0] for piece in pieces} - self._known_runs
        if new:
            self._known_runs |= new
            await self._forget()
        async with self._writing:
            await asyncio.to_thread(self._write, pieces)
        for run in [runs[run] for run in batch.reported if run in runs]:
            await self._reports.copy(run)
        self._cursors[node] = batch.next
        return sum(len(piece.content) for piece in batch.pieces) > PULL_BYTES // 2

    def _write(self, pieces: list[LogPiece]) -> None:
        for piece in pieces:
            try:
                self.copies.write(piece)
            except OSError as error:
                log.warning("no copy of %s %s: %s", piece.worker, piece.stream, error)

    async def _forget(self) -> None:
        state = self._state()
        ended = [run.id for run in state.runs.values() if run.ended]
        kept = set(state.runs)
        try:
            await asyncio.to_thread(self.copies.forget_all_but, kept.__contains__, [*ended, *state.open_runs])
            await asyncio.to_thread(self._reports.forget_all_but, kept.__contains__)
        except OSError as error:
            log.warning("copies of old logs cannot be dropped: %s", error)
        self._known_runs &= kept
