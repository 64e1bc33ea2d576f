"""A run's output as whole lines: all its workers and both streams, merged as they arrive, secrets taken out."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Literal

from racimo.agent.logs import is_notice
from racimo.agent.protocol import LogChunk, ReadLog, ReplyBody
from racimo.control.carrier import Carrier
from racimo.control.loop import Loop
from racimo.control.redaction import Redactor
from racimo.control.views import LogLine
from racimo.spec.errors import RacimoError
from racimo.state.events import AttemptPlanned, WorkersPlanned
from racimo.state.nouns import worker_id

FOLLOW_WAIT_S = 20.0
CROWDED_WAIT_S = 1.0
MAX_WAITING_READS = 160
"""Long reads at the agent, all followers together; its connection takes 256 requests. When few are left, reads are
short so that everybody gets a turn."""
FEW_LEFT = 32
READ_BYTES = 256 * 1024
MAX_LINE_BYTES = 1_000_000
"""A longer line is cut there and goes on as another."""
MAX_QUEUED_CHUNKS = 16
TAIL_BLOCK_BYTES = 64 * 1024
MAX_TAIL_BYTES = 4 * 2**20

Stream = Literal["out", "err"]
STREAMS: tuple[Stream, Stream] = ("out", "err")


class LineSplitter:
    """Bytes in, whole lines out (without their end); `rest` is the unfinished one."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, content: bytes) -> list[bytes]:
        *lines, self.rest = (self.rest + content).split(b"\n")
        cut: list[bytes] = []
        for line in lines:
            cut += [line[at : at + MAX_LINE_BYTES] for at in range(0, len(line), MAX_LINE_BYTES)] or [b""]
        while len(self.rest) >= MAX_LINE_BYTES:
            cut.append(self.rest[:MAX_LINE_BYTES])
            self.rest = self.rest[MAX_LINE_BYTES:]
        return cut


def start_of_tail(content: bytes, num_lines: int) -> int | None:
    """Where the last `num_lines` lines of `content` begin; None if it holds fewer whole ones."""
    end = len(content) - 1 if content.endswith(b"\n") else len(content)
    for _ in range(num_lines):
        end = content.rfind(b"\n", 0, end)
        if end < 0:
            return None
    return min(end + 1, len(content))


class LogSource:
    """Reads logs at the agent, for everybody who follows one."""

    def __init__(self, carrier: Carrier, loop: Loop) -> None:
        self.carrier = carrier
        self.loop = loop
        self._slots = asyncio.Semaphore(MAX_WAITING_READS)
        self._num_reading = 0

    async def read(self, worker: str, stream: Stream, offset: int, limit: int, follow: bool) -> LogChunk:
        """One chunk; with `follow` waits a while for one, and for the agent's return as long as it takes."""
        while True:
            await self._slots.acquire()
            self._num_reading += 1
            crowded = MAX_WAITING_READS - self._num_reading < FEW_LEFT
            wait_s = (CROWDED_WAIT_S if crowded else FOLLOW_WAIT_S) if follow else 0.0
            body = ReadLog(worker=worker, stream=stream, offset=offset, limit=limit, wait_s=wait_s)
            request = asyncio.create_task(self.carrier.request(self.carrier.local_node, body))
            request.add_done_callback(self._read_is_over)
            try:
                # A follower that leaves does not end the read at the agent, so its slot stays taken until that is over.
                chunk = await asyncio.shield(request)
            except RacimoError as error:
                if error.code == "unreachable" and follow:
                    continue  # the request has waited for the agent's return already
                raise
            assert isinstance(chunk, LogChunk)
            return chunk

    def _read_is_over(self, request: asyncio.Task[ReplyBody]) -> None:
        self._slots.release()
        self._num_reading -= 1
        if not request.cancelled():
            request.exception()  # seen, also where the follower has left

    async def lines(
        self, run: str, *, follow: bool = False, worker: str = "", tail: int | None = None
    ) -> AsyncGenerator[list[LogLine], None]:
        """Lines of all workers of all attempts of a run, or of one worker. With `follow` until the run has ended and
        everything was sent. `tail`: begins with that many lines of each stream of each worker."""
        queue: asyncio.Queue[list[LogLine] | None] = asyncio.Queue(MAX_QUEUED_CHUNKS)
        reading = asyncio.create_task(self._read_all(queue, run, follow, worker, tail), name=f"logs {run}")
        async for lines in _drain(queue, reading):
            yield lines

    async def lines_of_exec(
        self, run: str, worker: str, is_over: Callable[[], bool]
    ) -> AsyncGenerator[list[LogLine], None]:
        """Both streams of one `exec` until they have ended."""
        queue: asyncio.Queue[list[LogLine] | None] = asyncio.Queue(MAX_QUEUED_CHUNKS)
        redactor = self.carrier.redactor(run)

        async def read_both() -> None:
            readers = [LogReader(self, worker, stream, redactor, is_over) for stream in STREAMS]
            await asyncio.gather(*(reader.run(queue, follow=True) for reader in readers))

        async for lines in _drain(queue, asyncio.create_task(read_both(), name=f"exec {worker}")):
            yield lines

    async def _read_all(
        self, queue: asyncio.Queue[list[LogLine] | None], run: str, follow: bool, only: str, tail: int | None
    ) -> None:
        redactor = self.carrier.redactor(run)
        state = self.loop.core.state
        waiting: list[tuple[str, int, int]] = []
        live: set[asyncio.Task[None]] = set()
        seq = 0
        try:
            while True:
                pulse = self.loop.pulse(run)
                for record in await self.loop.records(run, seq):
                    seq = record.seq
                    event = record.event
                    if isinstance(event, AttemptPlanned | WorkersPlanned):
                        waiting += [(run, event.attempt, place.index) for place in event.placements]
                present, waiting = waiting, []
                for name in present:
                    worker = state.worker(*name)
                    if only and worker_id(*name) != only:
                        continue
                    if follow and worker is not None and worker.live and worker.status == "starting":
                        waiting.append(name)
                        continue
                    readers = [
                        LogReader(self, worker_id(*name), stream, redactor, lambda: state.runs[run].ended, tail)
                        for stream in STREAMS
                    ]
                    if follow and worker is not None:
                        live |= {asyncio.create_task(reader.run(queue, follow=True)) for reader in readers}
                    else:
                        for reader in readers:  # of the past: in order
                            await reader.run(queue, follow=False)
                if not follow or state.runs[run].ended:
                    break
                await pulse.wait()
            await asyncio.gather(*live)
        finally:
            for task in live:
                task.cancel()


class LogReader:
    """Reads one stream of one worker and puts its lines into a queue."""

    def __init__(
        self,
        source: LogSource,
        worker: str,
        stream: Stream,
        redactor: Redactor,
        is_over: Callable[[], bool],
        tail: int | None = None,
    ) -> None:
        self._source = source
        self._worker = worker
        self._stream = stream
        self._redactor = redactor
        self._is_over = is_over
        self._tail = tail

    async def run(self, queue: asyncio.Queue[list[LogLine] | None], follow: bool) -> None:
        """To the end of what is there; with `follow` to the end of the stream."""
        splitter = LineSplitter()
        try:
            offset = await self._start() if self._tail is not None else 0
            while True:
                over = self._is_over()
                chunk = await self._source.read(self._worker, self._stream, offset, READ_BYTES, follow)
                if chunk.offset != offset:
                    splitter.rest = b""  # older parts were dropped in the middle of a line
                offset = chunk.offset + len(chunk.content)
                lines = [self._line(line) for line in splitter.feed(chunk.content)]
                if lines:
                    await queue.put(lines)
                if chunk.ended or (not chunk.content and (over or not follow)):
                    break
        except RacimoError as error:
            if error.code not in ("not-found", "run-unknown"):
                raise  # a worker that never came to life has no output; anything else is said
        if splitter.rest:
            await queue.put([self._line(splitter.rest)])

    async def _start(self) -> int:
        assert self._tail is not None
        block = TAIL_BLOCK_BYTES
        while True:
            chunk = await self._source.read(self._worker, self._stream, -block, block, follow=False)
            start = start_of_tail(chunk.content, self._tail)
            if start is not None:
                return chunk.offset + start
            if chunk.offset == 0 or len(chunk.content) < block or block >= MAX_TAIL_BYTES:
                return chunk.offset
            block *= 4

    def _line(self, line: bytes) -> LogLine:
        text = line.removesuffix(b"\r").decode(errors="replace")
        if is_notice(text):  # not the worker's own words: must not get into what its output is piped to
            return LogLine(worker=self._worker, stream="err", text=text.rstrip())
        return LogLine(worker=self._worker, stream=self._stream, text=self._redactor.text(text))


async def _drain(
    queue: asyncio.Queue[list[LogLine] | None], reading: asyncio.Task[None]
) -> AsyncGenerator[list[LogLine], None]:
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
