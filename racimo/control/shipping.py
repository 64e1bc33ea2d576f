"""Contents to nodes: once over the control process's own link, from then on from node to node, while they arrive."""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field

from racimo.agent.protocol import FetchBlobs, FetchReply, PeerAddress, PutBlob, PutBlobPart, ReplyBody, RequestBody
from racimo.control.snapshots import SnapshotStore
from racimo.state.nouns import Node

PART_BYTES = 512 * 1024
"""A content beyond it goes in pieces, so that nothing waits long behind it on the link."""
MAX_BYTES_ON_THE_WAY = 4 * 2**20
MAX_REQUESTS_ON_THE_WAY = 32
MAX_DEPTH = 16
"""Of a chain of nodes that pass contents on: each adds some milliseconds, and who follows a dead one begins again."""
MAX_REMEMBERED = 256
"""Transfers that are over and whose nodes may be asked for what came."""

log = logging.getLogger("racimo.control.shipping")

Request = Callable[[str, RequestBody], Awaitable[ReplyBody]]


def peer_of(node: Node) -> PeerAddress | None:
    """Where other nodes reach its agent; None if nowhere."""
    if not node.address or not node.peer_port:
        return None
    return PeerAddress(node=node.id, address=node.address, port=node.peer_port, pin=node.peer_pin)


@dataclass(eq=False, slots=True)
class Transfer:
    """What one node is getting, or has got."""

    node: str
    contents: frozenset[str]
    done: bool = False
    upstream: "Transfer | None" = None
    """Whose node passes it on; None: the control process, or nobody any more."""
    begun_s: float = field(default_factory=time.monotonic)
    feeds: int = 0
    """How many tries to bring it there have begun; a new one may succeed where those who followed the last failed."""
    num_children: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def chain(self) -> list["Transfer"]:
        """This one and those before it that it still depends on."""
        found: list[Transfer] = []
        at: Transfer | None = self
        while at is not None and not at.done and at not in found:
            found.append(at)
            at = at.upstream
        return found


class Shipping:
    """`request` asks a node's agent; `sources` are the nodes that may be asked for contents by others now: connected
    ones, without the head's own (what it has the control process has, and its link is the one to be spared)."""

    def __init__(self, snapshots: SnapshotStore, request: Request, sources: Callable[[], Iterable[Node]]) -> None:
        self._snapshots, self._request, self._sources = snapshots, request, sources
        self._active: dict[str, Transfer] = {}
        self._past: deque[Transfer] = deque(maxlen=MAX_REMEMBERED)
        self._interned: frozenset[str] = frozenset()
        self.sent_bytes = 0
        """Over the control process's own links so far."""

    def to(self, node: str) -> Transfer | None:
        """What is on its way to a node now."""
        return self._active.get(node)

    async def provide(self, node: str, missing: Collection[str], also_at: Collection[str] = ()) -> None:
        """Returns once the node has these contents. `also_at`: nodes that are known to have them, such as from before
        this process began. `RacimoError` (the node's refusal, or `unreachable`), `OSError`.
        """
        wanted = set(missing)
        while (earlier := self._active.get(node)) is not None:  # for another worker there
            await earlier.over.wait()
            if earlier.done:
                wanted -= earlier.contents
        if not wanted:
            return
        transfer = Transfer(node, self._intern(wanted))
        self._active[node] = transfer
        try:
            await self._bring(transfer, wanted, [Transfer(name, transfer.contents, done=True) for name in also_at])
            transfer.done = True
            self._past.append(transfer)
        finally:
            transfer.upstream = None
            del self._active[node]
            transfer.over.set()

    def _intern(self, contents: set[str]) -> frozenset[str]:
        """Workers of one run mostly miss the same on every node: one set for all of them."""
        if self._interned != contents:
            self._interned = frozenset(contents)
        return self._interned

    async def _bring(self, transfer: Transfer, wanted: set[str], known: list[Transfer]) -> None:
        failed: set[tuple[str, int]] = set()
        while wanted:
            source = self._choose(transfer, wanted, failed, known)
            if source is None:
                break
            upstream, peer = source
            feed = (upstream.node, upstream.feeds)
            transfer.feeds += 1
            here = wanted & upstream.contents
            transfer.upstream = upstream
            upstream.num_children += 1
            try:
                reply = await self._request(transfer.node, FetchBlobs(source=peer, sha256s=tuple(sorted(here))))
            finally:
                upstream.num_children -= 1
                transfer.upstream = None
            assert isinstance(reply, FetchReply)
            wanted -= here - set(reply.missing)
            if reply.missing:
                failed.add(feed)
                why = reply.problem or f"{len(reply.missing)} contents are not there"
                log.warning("node %s could not get all from %s: %s", transfer.node, upstream.node, why)
        if wanted:
            transfer.feeds += 1
            await self._send(transfer.node, sorted(wanted))

    def _choose(
        self, transfer: Transfer, wanted: set[str], failed: set[tuple[str, int]], known: list[Transfer]
    ) -> tuple[Transfer, PeerAddress] | None:
        """Who passes on the most of it, at the end of a chain rather than in its middle."""
        nodes = {node.id: node for node in self._sources()}
        if transfer.node not in nodes:
            return None  # the head's own agent: from here to there is no way at all
        peers = {name: peer for name, node in nodes.items() if (peer := peer_of(node)) is not None}
        best: tuple[tuple[int, int, int], Transfer] | None = None
        for other in (*self._active.values(), *self._past, *known):
            if other.node == transfer.node or (other.node, other.feeds) in failed or other.node not in peers:
                continue
            depth = len(other.chain)
            if depth >= MAX_DEPTH or transfer in other.chain:
                continue
            overlap = len(wanted) if other.contents is transfer.contents else len(wanted & other.contents)
            if overlap:
                rank = (-overlap, other.num_children, depth)
                if best is None or rank < best[0]:
                    best = (rank, other)
        return None if best is None else (best[1], peers[best[1].node])

    async def _send(self, node: str, sha256s: list[str]) -> None:
        """From the control process itself, several pieces on the way at once and each content's in order."""
        on_the_way: deque[tuple[asyncio.Task[ReplyBody], int]] = deque()
        bytes_on_the_way = 0
        try:
            for sha256 in sha256s:
                path = self._snapshots.blob_path(sha256)
                with contextlib.closing(await asyncio.to_thread(open, path, "rb", 0)) as file:
                    size_bytes = os.fstat(file.fileno()).st_size
                    for offset in range(0, max(size_bytes, 1), PART_BYTES):
                        content = await asyncio.to_thread(file.read, PART_BYTES)
                        body: RequestBody = PutBlob(sha256=sha256, content=content)
                        if size_bytes > PART_BYTES:
                            body = PutBlobPart(sha256=sha256, offset=offset, total_bytes=size_bytes, content=content)
                        task = asyncio.ensure_future(self._request(node, body))
                        on_the_way.append((task, len(content)))
                        bytes_on_the_way += len(content)
                        while bytes_on_the_way > MAX_BYTES_ON_THE_WAY or len(on_the_way) > MAX_REQUESTS_ON_THE_WAY:
                            bytes_on_the_way -= await self._arrived(on_the_way)
            while on_the_way:
                await self._arrived(on_the_way)
        finally:
            for task, _ in on_the_way:
                task.cancel()
            await asyncio.gather(*(task for task, _ in on_the_way), return_exceptions=True)

    async def _arrived(self, on_the_way: deque[tuple[asyncio.Task[ReplyBody], int]]) -> int:
        """The oldest piece has; how many bytes it had. `RacimoError`: the node's refusal."""
        task, num_bytes = on_the_way[0]
        await task
        on_the_way.popleft()
        self.sent_bytes += num_bytes
        return num_bytes
