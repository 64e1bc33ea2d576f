"""What workers write, given piece by piece to the control process for its copy: the last MB of each log at most; and
word of who has reported something.

Logs stay where they were written; the copy is for the day this machine is gone (kuberay#1047, ray#44561). Nothing is
looked at while nobody writes: inotify says which worker did.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from racimo.agent.inotify import FileWatcher, FolderWatch
from racimo.agent.logs import BLOCK_BYTES, read_log
from racimo.agent.protocol import LogBatch, LogPiece, PullLogs
from racimo.agent.pulse import Pulse
from racimo.agent.runs import Runs
from racimo.agent.workers import Workers

LAST_BYTES = 2**20
MAX_BATCH_BYTES = 16 * 2**20
MAX_WAIT_S = 60.0
REPORTS_DELAY_S = 2.0
RECENT_S = 3600.0
"""After its agent was started anew, ends within this time are told again, as nobody knows what was sent of them."""
MAX_RECENT = 200
STREAMS: tuple[Literal["out", "err"], ...] = ("out", "err")


class _Tail:
    """One log. `offset`: up to where control has it; None while nothing is known of that."""

    def __init__(self, worker: str, stream: Literal["out", "err"], path: Path) -> None:
        self.worker, self.stream, self.path = worker, stream, path
        self.offset: int | None = None
        self.given: int | None = None
        """Up to where the batch goes that is not acknowledged yet."""
        self.changed = True

    def grew(self) -> bool:
        """Whether there is more than what was given."""
        try:
            return self.path.stat().st_size > (self.given or self.offset or 0)
        except FileNotFoundError:
            return False

    def read(self, most_bytes: int) -> LogPiece | None:
        """What follows `offset`, or the last MB where more than that does. Blocks on the disk."""
        try:
            size_bytes = self.path.stat().st_size
        except FileNotFoundError:
            return None
        begin = self.offset or 0
        if size_bytes - begin > LAST_BYTES:
            # At the border of a block: what lies before it in the copy stays a hole.
            begin = -(-(size_bytes - LAST_BYTES) // BLOCK_BYTES) * BLOCK_BYTES
        begin, content = read_log(self.path, begin, min(most_bytes, LAST_BYTES))
        if not content:
            return None
        self.changed = self.changed or begin + len(content) < size_bytes
        return LogPiece(worker=self.worker, stream=self.stream, offset=begin, content=content)


class LogTails:
    """The logs of live and recently ended workers and how far the control process has them."""

    def __init__(
        self, workers: Workers, runs: Runs, files: FileWatcher, wall_s: Callable[[], float] = time.time
    ) -> None:
        self._workers, self._runs, self._files, self._wall_s = workers, runs, files, wall_s
        self._tails: dict[str, list[_Tail]] = {}
        self._watches: dict[str, tuple[FolderWatch, Callable[[], None]]] = {}
        self._number = self._before = 1 + secrets.randbits(40)
        """Of the newest batch, and of the one before. They begin anywhere: a number of an earlier agent is no number
        of this one."""
        self._changed = Pulse()
        self._turn = 0
        self._one_pull = asyncio.Lock()
        self._reported: set[str] = set()
        self._told: frozenset[str] = frozenset()
        """In the batch that is not acknowledged yet."""
        self._delay: asyncio.TimerHandle | None = None
        workers.started.listeners.add(self._changed.beat)
        runs.news.listeners.add(self._delay_reports)

    async def pull(self, message: PullLogs) -> LogBatch:
        """The next batch; empty if nothing was written within `wait_s`. A later pull ends one that still waits."""
        self._turn += 1
        turn = self._turn
        self._changed.beat()
        async with self._one_pull:
            self._note_cursor(message.after)
            deadline_s = time.monotonic() + min(message.wait_s, MAX_WAIT_S)
            limit = min(max(message.limit_bytes, BLOCK_BYTES), MAX_BATCH_BYTES)
            while turn == self._turn:
                self._follow_workers()
                try:
                    pieces = await self._collect(limit)
                except BaseException:  # such as the end of the connection: nothing of it was sent
                    self._take_back()
                    raise
                if turn != self._turn:
                    self._take_back()
                    break
                if pieces or self._reported:
                    self._before, self._number = self._number, self._number + 1
                    self._told, self._reported = frozenset(self._reported), set()
                    return LogBatch(next=self._number, pieces=tuple(pieces), reported=tuple(sorted(self._told)))
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                if not self._reported and not any(tail.changed for tail in self._each()):
                    await self._changed.wait(left_s)
            return LogBatch(next=self._number)

    def close(self) -> None:
        if self._delay is not None:
            self._delay.cancel()
        self._let_go()

    def _let_go(self) -> None:
        for worker in list(self._watches):
            self._unfollow(worker)
        self._tails.clear()

    def _delay_reports(self) -> None:
        """A training reports at every step: that is told in bundles, where anybody listens."""
        if self._delay is None and self._turn:
            self._delay = asyncio.get_running_loop().call_later(REPORTS_DELAY_S, self._take_reports)

    def _take_reports(self) -> None:
        self._delay = None
        self._reported |= self._runs.reported
        self._runs.reported.clear()
        self._changed.beat()

    def _note_cursor(self, after: int) -> None:
        if after == self._number:
            for tail in self._each():
                tail.offset = tail.offset if tail.given is None else tail.given
                tail.given = None
            self._told = frozenset()
            self._before = after
        elif after == self._before:
            self._take_back()  # the batch has not arrived
        else:
            self._let_go()
            recent = self._recent()
            entries = self._workers.entries.values()
            self._reported = {entry.run for entry in entries if entry.live or entry.name in recent}
            self._runs.reported.clear()

    def _take_back(self) -> None:
        self._reported |= self._told
        self._told = frozenset()
        for tail in self._each():
            tail.changed = tail.changed or tail.given is not None
            tail.given = None

    def _each(self) -> list[_Tail]:
        return [tail for tails in self._tails.values() for tail in tails]

    def _follow_workers(self) -> None:
        """Takes up workers that are new, and lets go of those whose last word was sent."""
        entries = self._workers.entries
        first = not self._tails
        recent = self._recent() if first else frozenset()
        for name, entry in entries.items():
            if name in self._tails or entry.order.exec_of:
                continue
            if first and not entry.live and name not in recent:
                self._tails[name] = []
                continue
            entry.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._tails[name] = [_Tail(name, stream, entry.directory / f"{stream}.log") for stream in STREAMS]
            self._watch(name, entry.directory)
        for name in list(self._tails):
            ended = name not in entries or not entries[name].live
            if ended and all(tail.given is None and not tail.changed for tail in self._tails[name]):
                self._unfollow(name)
                if name in entries:
                    self._tails[name] = []
                else:
                    del self._tails[name]

    def _recent(self) -> frozenset[str]:
        """The workers that ended last, by when something was last written into their folders."""
        ends: list[tuple[float, str]] = []
        for name, entry in self._workers.entries.items():
            if not entry.live:
                try:
                    ends.append((entry.directory.stat().st_mtime, name))
                except FileNotFoundError:
                    continue  # its run was forgotten
        since_s = self._wall_s() - RECENT_S
        return frozenset(name for at_s, name in sorted(ends)[-MAX_RECENT:] if at_s >= since_s)

    def _watch(self, name: str, folder: Path) -> None:
        watch = self._files.watch(folder)
        tails = self._tails[name]

        def written() -> None:
            """Something in the folder, which may be a commit and no log."""
            for tail in tails:
                tail.changed = tail.changed or tail.grew()
            if any(tail.changed for tail in tails):
                self._changed.beat()

        watch.pulse.listeners.add(written)
        self._watches[name] = watch, written

    def _unfollow(self, name: str) -> None:
        watch, written = self._watches.pop(name, (None, None))
        if watch is not None and written is not None:
            watch.pulse.listeners.discard(written)
            watch.__exit__()

    async def _collect(self, limit: int) -> list[LogPiece]:
        """Pieces of those that changed, in turn, up to `limit` bytes together."""
        pieces: list[LogPiece] = []
        for tail in self._each():
            if not tail.changed:
                continue
            if limit < BLOCK_BYTES:
                break
            tail.changed = False
            try:
                piece = await asyncio.to_thread(tail.read, limit)
            except BaseException:
                tail.changed = True
                raise
            if piece is not None:
                pieces.append(piece)
                tail.given = piece.offset + len(piece.content)
                limit -= len(piece.content)
                # Who has spoken stands behind those who have not.
                tails = self._tails.pop(tail.worker, None)
                if tails is not None:
                    self._tails[tail.worker] = tails
        return pieces
