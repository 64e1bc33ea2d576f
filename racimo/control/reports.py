"""What the workers of a run reported, from all nodes: first wins per trial, step and name.

A run on the head alone is read there. Once it has been elsewhere, the lines of its nodes are merged into a file at the
head, in the order in which they came here: a client's position in it means the same after a restart and without those
nodes. The first node's come first, so that positions from before there was a second stay right.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from racimo.agent.protocol import ReadReports, Report, ReportBatch
from racimo.agent.runs import Seen, decode_report, encode_report
from racimo.control.carrier import Carrier
from racimo.control.views import ReportsView
from racimo.spec.errors import RacimoError
from racimo.state.nouns import Run

MAX_OPEN_RUNS = 64
"""Runs whose merged reports are held in memory; others are read again from their file."""
MAX_LINES = 100_000
"""Of one run, as at its agents."""
BATCH_LINES = 5_000
ASK_TIMEOUT_S = 5.0
AWAY = ("unreachable", "node-unknown")

log = logging.getLogger("racimo.control.reports")


class _Merged:
    """One run's reports: the file, and how far each node was read in this process's life."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: list[Report] = []
        self._seen = Seen()
        self.read_upto: dict[str, int] = {}
        self.lock = asyncio.Lock()
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return
        for line in content.split(b"\n"):
            try:
                report = self._seen.fresh(decode_report(line))
            except msgspec.DecodeError:
                continue  # the end of the file, or what a full disk cut off
            if report is not None:
                self._seen.note(report)
                self.lines.append(report)

    def add(self, reports: tuple[Report, ...]) -> None:
        """Keeps what is new. `OSError` if the disk does not take it; then it is read again."""
        seen, fresh = self._seen.copy(), []
        for report in reports[: MAX_LINES - len(self.lines)]:
            new = seen.fresh(report)
            if new is not None:
                seen.note(new)
                fresh.append(new)
        if fresh:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(self._path, "ab") as file:
                file.write(b"".join(map(encode_report, fresh)))
        self._seen = seen
        self.lines += fresh


class ReportBoard:
    """The reports of all runs, below `folder` where they were merged."""

    def __init__(self, carrier: Carrier, folder: Path) -> None:
        self._carrier, self._folder = carrier, folder
        self._open: dict[str, _Merged] = {}

    async def read(self, run: Run, after: int, limit: int) -> ReportsView:
        """Lines from number `after` on. `RacimoError` unreachable if this machine's agent does not answer."""
        if not self._is_elsewhere(run):
            batch = await self._ask("", run.id, after, limit)
            return ReportsView(next=batch.next, reports=batch.reports)
        merged = self._merged(run.id)
        away = await self._merge(run, merged)
        chosen = tuple(merged.lines[after : after + limit])
        return ReportsView(next=after + len(chosen), reports=chosen, away=tuple(away))

    async def copy(self, run: Run) -> None:
        """Takes what there is now, so that it is here when its node is not."""
        if self._is_elsewhere(run):
            await self._merge(run, self._merged(run.id))

    def _is_elsewhere(self, run: Run) -> bool:
        return bool(set(run.nodes) - {self._carrier.local_node}) or self._path(run.id).exists()

    async def _merge(self, run: Run, merged: _Merged) -> list[str]:
        """The nodes that do not answer."""
        away = []
        async with merged.lock:
            for node in run.nodes:  # one after the other: the order of the first merge is that of the nodes
                if not await self._read_node(merged, run.id, node):
                    away.append(node)
        return away

    def forget_all_but(self, kept: Callable[[str], bool]) -> None:
        """Drops what was merged of runs that are not `kept`. Blocks on the disk."""
        for path in self._folder.glob("*.jsonl"):
            if not kept(path.stem):
                path.unlink(missing_ok=True)

    async def _read_node(self, merged: _Merged, run: str, node: str) -> bool:
        """Takes what a node has; False if it does not answer."""
        if node not in self._carrier.connected_nodes:
            return False
        while True:
            try:
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    batch = await self._ask(node, run, merged.read_upto.get(node, 0), BATCH_LINES)
            except TimeoutError:
                return False
            except RacimoError as error:
                if error.code in AWAY:
                    return False
                raise
            if not batch.reports:
                return True
            try:
                await asyncio.to_thread(merged.add, batch.reports)
            except OSError as error:  # a full disk: the node still has it
                log.warning("reports of %s cannot be kept: %s", run, error)
                return True
            merged.read_upto[node] = batch.next

    async def _ask(self, node: str, run: str, after: int, limit: int) -> ReportBatch:
        reply = await self._carrier.request(node, ReadReports(run=run, after=after, limit=limit))
        assert isinstance(reply, ReportBatch)
        return reply

    def _merged(self, run: str) -> _Merged:
        if run not in self._open:
            if len(self._open) >= MAX_OPEN_RUNS:
                idle = next((name for name, one in self._open.items() if not one.lock.locked()), None)
                if idle is not None:
                    del self._open[idle]
            self._open[run] = _Merged(self._path(run))
        return self._open[run]

    def _path(self, run: str) -> Path:
        return self._folder / f"{run}.jsonl"
