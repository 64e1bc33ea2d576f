"""A run's output as whole lines: all its workers and both streams, merged as they arrive, secrets taken out."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from racimo.agent.logs import is_notice
from racimo.control.log_lines import STREAMS, LineSplitter, Positions, Stream, start_of_tail
from racimo.control.log_source import LogSource, Part, Place
from racimo.control.redaction import Redactor
from racimo.control.views import LogLine
from racimo.spec.errors import RacimoError
from racimo.state.events import AttemptPlanned, WorkersPlanned

READ_BYTES = 256 * 1024
MAX_QUEUED_CHUNKS = 16
TAIL_BLOCK_BYTES = 64 * 1024
MAX_TAIL_BYTES = 4 * 2**20

Queue = asyncio.Queue[list[LogLine] | None]


class LogStreams:
    """What `logs` and `exec` answer."""

    def __init__(self, source: LogSource) -> None:
        self._source = source

    async def of_run(
        self,
        run: str,
        *,
        follow: bool = False,
        worker: str = "",
        tail: int | None = None,
        begin: Positions | None = None,
    ) -> AsyncGenerator[list[LogLine], None]:
        """Lines of all workers of all attempts of a run, or of one worker. With `follow` until the run has ended and
        everything was sent. `begin`: where to go on; of other workers `tail`: with that many lines of each stream."""
        queue: Queue = asyncio.Queue(MAX_QUEUED_CHUNKS)
        told = Told(queue, self._source.carrier.redactor(run))
        reading = asyncio.create_task(self._read_all(told, run, follow, worker, tail, begin or {}), name=f"logs {run}")
        async for lines in _drain(queue, reading):
            yield lines

    async def of_exec(self, place: Place, is_over: Callable[[], bool]) -> AsyncGenerator[list[LogLine], None]:
        """Both streams of one `exec` until they have ended."""
        queue: Queue = asyncio.Queue(MAX_QUEUED_CHUNKS)
        told = Told(queue, self._source.carrier.redactor(place.run))

        async def read_both() -> None:
            readers = [LogReader(self._source, place, stream, told, is_over) for stream in STREAMS]
            await asyncio.gather(*(reader.run(follow=True) for reader in readers))

        async for lines in _drain(queue, asyncio.create_task(read_both(), name=f"exec {place.worker}")):
            yield lines

    async def _read_all(
        self, told: "Told", run: str, follow: bool, only: str, tail: int | None, begin: Positions
    ) -> None:
        loop = self._source.loop
        state = loop.core.state
        waiting: list[Place] = []
        live: set[asyncio.Task[None]] = set()
        seq = 0
        try:
            while True:
                pulse = loop.pulse(run)
                for record in await loop.records(run, seq):
                    seq = record.seq
                    event = record.event
                    if isinstance(event, AttemptPlanned | WorkersPlanned):
                        waiting += [
                            Place(run=run, attempt=event.attempt, index=placed.index, node=placed.node)
                            for placed in event.placements
                        ]
                present, waiting = waiting, []
                for place in present:
                    worker = state.worker(run, place.attempt, place.index)
                    if only and place.worker != only:
                        continue
                    if follow and worker is not None and worker.live and worker.status == "starting":
                        waiting.append(place)
                        continue
                    known = begin.get((place.attempt, place.index), (None, None))
                    readers = [
                        LogReader(self._source, place, stream, told, lambda: state.runs[run].ended, tail, at)
                        for stream, at in zip(STREAMS, known, strict=True)
                    ]
                    if follow and worker is not None:
                        live |= {asyncio.create_task(reader.run(follow=True)) for reader in readers}
                    else:
                        for reader in readers:  # of the past: in order
                            await reader.run(follow=False)
                if not follow or state.runs[run].ended:
                    break
                await pulse.wait()
            await asyncio.gather(*live)
        finally:
            for task in live:
                task.cancel()


class Told:
    """What one client is told: lines without secrets, and each notice about a node once."""

    def __init__(self, queue: Queue, redactor: Redactor) -> None:
        self._queue, self._redactor = queue, redactor
        self._notices: set[str] = set()

    async def lines(self, worker: str, stream: Stream, lines: list[tuple[int, bytes]]) -> None:
        if lines:
            await self._queue.put([self._line(worker, stream, end, line) for end, line in lines])

    async def notice(self, worker: str, notice: str) -> None:
        """A word of ours, which must not get into what the worker's output is piped to."""
        if notice and notice not in self._notices:
            self._notices.add(notice)
            await self._queue.put([LogLine(worker=worker, stream="err", text=f"[racimo: {notice}]")])

    def _line(self, worker: str, stream: Stream, end: int, line: bytes) -> LogLine:
        text = line.removesuffix(b"\r").decode(errors="replace")
        if is_notice(text):  # not the worker's own words either
            return LogLine(worker=worker, stream="err", text=text.rstrip())
        return LogLine(worker=worker, stream=stream, text=self._redactor.text(text), offset=end)


class LogReader:
    """Reads one stream of one worker and tells its lines."""

    def __init__(
        self,
        source: LogSource,
        place: Place,
        stream: Stream,
        told: Told,
        is_over: Callable[[], bool],
        tail: int | None = None,
        begin: int | None = None,
    ) -> None:
        self._source, self._place, self._stream, self._told = source, place, stream, told
        self._is_over = is_over
        self._tail, self._begin = tail, begin

    async def run(self, follow: bool) -> None:
        """To the end of what is there; with `follow` to the end of the stream."""
        worker = self._place.worker
        splitter = LineSplitter()
        try:
            offset = await self._start()
            splitter.jump(offset)
            while True:
                over = self._is_over()
                part = await self._read(offset, READ_BYTES, follow)
                await self._told.notice(worker, part.notice)
                if part.offset != offset:
                    splitter.jump(part.offset)  # older parts were dropped in the middle of a line
                offset = part.offset + len(part.content)
                await self._told.lines(worker, self._stream, splitter.feed(part.content))
                if part.ended or (not part.content and (over or not follow)):
                    break
        except RacimoError as error:
            if error.code not in ("not-found", "run-unknown"):
                raise  # a worker that never came to life has no output; anything else is said
        if splitter.rest:
            await self._told.lines(worker, self._stream, [(splitter.at + len(splitter.rest), splitter.rest)])

    async def _read(self, offset: int, limit: int, follow: bool) -> Part:
        return await self._source.read(self._place, self._stream, offset, limit, follow)

    async def _start(self) -> int:
        if self._begin is not None:
            return self._begin
        if self._tail is None:
            return 0
        block = TAIL_BLOCK_BYTES
        while True:
            part = await self._read(-block, block, follow=False)
            start = start_of_tail(part.content, self._tail)
            if start is not None:
                return part.offset + start
            if part.offset == 0 or len(part.content) < block or block >= MAX_TAIL_BYTES:
                return part.offset
            block *= 4


async def _drain(queue: Queue, reading: asyncio.Task[None]) -> AsyncGenerator[list[LogLine], None]:
    """What `reading` puts into the queue until it is done; ends it when nobody listens any more."""

    async def close_when_done() -> None:
        await asyncio.wait({reading})
        await queue.put(None)

    closing = asyncio.create_task(close_when_done())
    try:
        while (lines := await queue.get()) is not None:
            yield lines
        reading.result()  # raises what went wrong
    finally:
        closing.cancel()
        reading.cancel()
        await asyncio.wait({reading, closing})
