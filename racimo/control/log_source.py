"""Where the bytes of a worker's log come from: its node, or the head's own copy while that node does not answer."""

import asyncio

import msgspec

from racimo.agent.protocol import LogChunk, ReadLog, ReplyBody
from racimo.control.carrier import Carrier
from racimo.control.log_lines import Stream
from racimo.control.loop import Loop
from racimo.control.mirror import LogCopies
from racimo.spec.errors import RacimoError
from racimo.state.nouns import parse_worker_id, worker_id

FOLLOW_WAIT_S = 20.0
CROWDED_WAIT_S = 1.0
MAX_WAITING_READS = 160
"""Long reads at one agent, all followers together; its connection takes 256 requests. When few are left, reads are
short so that everybody gets a turn."""
FEW_LEFT = 32
BLINK_S = 1.0
"""So long a node that counts as up may be without its link before the copy is read instead."""
AWAY = ("unreachable", "node-unknown")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A worker and the node on which it is or was."""

    run: str
    attempt: int
    index: int
    node: str

    @staticmethod
    def of(worker: str, node: str) -> "Place":
        run, attempt, index = parse_worker_id(worker)
        return Place(run=run, attempt=attempt, index=index, node=node)

    @property
    def worker(self) -> str:
        return worker_id(self.run, self.attempt, self.index)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """`content` of a log from `offset` on. `ended`: no more will come. `notice`: why it is not from the worker's node,
    in words for people."""

    offset: int
    content: bytes
    ended: bool = False
    notice: str = ""


class _Slots:
    """The long reads at one node's agent."""

    def __init__(self) -> None:
        self.free = asyncio.Semaphore(MAX_WAITING_READS)
        self.num_taken = 0

    def release(self, request: asyncio.Task[ReplyBody]) -> None:
        self.free.release()
        self.num_taken -= 1
        if not request.cancelled():
            request.exception()  # seen, also where the follower has left


class LogSource:
    """Reads logs for everybody who follows one."""

    def __init__(self, carrier: Carrier, loop: Loop, copies: LogCopies) -> None:
        self.carrier, self.loop, self._copies = carrier, loop, copies
        self._slots: dict[str, _Slots] = {}

    async def read(self, place: Place, stream: Stream, offset: int, limit: int, follow: bool) -> Part:
        """What is there from `offset` on (negative: from the end); with `follow` waits a while for some.

        `RacimoError`: what the agent refuses with; `unreachable` for this machine's own, unless `follow`."""
        if self._is_away(place.node):
            await self._blink(place.node)
        while self._is_away(place.node):
            part = await self._copied(place, stream, offset, limit, "does not answer")
            if part.content or not follow:
                return part
            await self._news(place)
            if self._is_away(place.node):
                return part
        body = ReadLog(worker=place.worker, stream=stream, offset=offset, limit=limit)
        while True:
            try:
                chunk = await self._ask(place.node, body, follow)
            except RacimoError as error:
                if error.code == "not-found" and await asyncio.to_thread(self._copies.has, place.worker):
                    part = await self._copied(place, stream, offset, limit, "no longer has this log")
                    return msgspec.structs.replace(part, ended=not part.content)
                if error.code not in AWAY:
                    raise
                if self._is_away(place.node):
                    return await self._copied(place, stream, offset, limit, "does not answer")
                if not follow:
                    raise
                continue  # the request has waited for the agent's return already
            return Part(offset=chunk.offset, content=chunk.content, ended=chunk.ended)

    def _is_away(self, node: str) -> bool:
        """This machine's own agent is never away for long: its supervisor starts it again."""
        own = self.carrier.local_node
        return bool(own) and node not in ("", own) and node not in self.carrier.connected_nodes

    async def _blink(self, node: str) -> None:
        """A link that was cut is made anew at once: waits a moment for it where nothing worse is known."""
        known = self.loop.core.state.nodes.get(node)
        if known is None or known.status != "up":
            return
        deadline_s = asyncio.get_running_loop().time() + BLINK_S
        while self._is_away(node) and (left_s := deadline_s - asyncio.get_running_loop().time()) > 0:
            await self.carrier.nodes_changed.wait(left_s)

    async def _copied(self, place: Place, stream: Stream, offset: int, limit: int, why: str) -> Part:
        if not await asyncio.to_thread(self._copies.has, place.worker):
            return Part(offset=max(offset, 0), content=b"", notice=f"node {place.node} {why}, and it had sent nothing")
        chunk = await asyncio.to_thread(self._copies.read, place.worker, stream, offset, limit)
        notice = f"node {place.node} {why}; the last MB that it sent"
        return Part(offset=chunk.offset, content=chunk.content, notice=notice)

    async def _news(self, place: Place) -> None:
        """Until a node comes or goes, something happens to the run, or a while has passed."""
        news = asyncio.Event()
        listeners = self.carrier.nodes_changed.listeners
        listeners.add(news.set)
        waits = [asyncio.ensure_future(event.wait()) for event in (news, self.loop.pulse(place.run))]
        try:
            await asyncio.wait(waits, timeout=FOLLOW_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            listeners.discard(news.set)
            for wait in waits:
                wait.cancel()

    async def _ask(self, node: str, body: ReadLog, follow: bool) -> LogChunk:
        slots = self._slots.setdefault(node, _Slots())
        await slots.free.acquire()
        slots.num_taken += 1
        crowded = MAX_WAITING_READS - slots.num_taken < FEW_LEFT
        wait_s = (CROWDED_WAIT_S if crowded else FOLLOW_WAIT_S) if follow else 0.0
        request = asyncio.create_task(self.carrier.request(node, msgspec.structs.replace(body, wait_s=wait_s)))
        request.add_done_callback(slots.release)
        # A follower that leaves does not end the read at the agent, so its slot stays taken until that is over.
        chunk = await asyncio.shield(request)
        assert isinstance(chunk, LogChunk)
        return chunk
