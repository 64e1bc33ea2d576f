"""A run's outputs on all its nodes, seen as one folder: which there are, and from which node a path is read.

Where a path exists on several nodes, the one of the newest attempt's lowest rank counts. A node that does not answer is
named, not left out in silence.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable

from msgspec.structs import replace

from racimo.agent.outputs import files_beside, list_outputs, open_output
from racimo.agent.protocol import ListOutputs, OutputChunk, OutputList, ReadOutput
from racimo.control.carrier import Carrier
from racimo.control.loop import Loop
from racimo.control.views import OutputsView, OutputView
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.state.events import AttemptPlanned, Record, WorkersPlanned
from racimo.state.nouns import Run

READ_BYTES = 256 * 1024
CHUNK_BYTES = 2**20
"""Of a file on another node: so much is asked for at once, and the next while it is passed on."""
LIST_TIMEOUT_S = 10.0
AWAY = ("unreachable", "node-unknown")

Parts = AsyncGenerator[bytes, None]


class Outputs:
    """Lists and reads. What lies on this machine is read here, the rest through the agents."""

    def __init__(self, home: Home, carrier: Carrier, loop: Loop) -> None:
        self._home, self._carrier, self._loop = home, carrier, loop

    async def listing(self, run: Run, only: str = "") -> OutputsView:
        """All files by path, each once. `only`: those of this node. `RacimoError` node-unknown."""
        nodes = await self._nodes(run, only)
        listings = await asyncio.gather(*(self._list_on(run.id, node) for node in nodes))
        files: dict[str, OutputView] = {}
        beside: dict[str, None] = {}
        for node, listing in zip(nodes, listings, strict=True):
            beside.update(dict.fromkeys(listing.beside if listing is not None else ()))
            for file in listing.files if listing is not None else ():
                if (known := files.get(file.path)) is not None:
                    files[file.path] = replace(known, others=(*known.others, node))
                    continue
                view = OutputView(
                    path=file.path, size_bytes=file.size_bytes, modified_wall_s=file.modified_wall_s, node=node
                )
                files[file.path] = view
        away = tuple(node for node, listing in zip(nodes, listings, strict=True) if listing is None)
        return OutputsView(files=tuple(files[path] for path in sorted(files)), away=away, beside=tuple(beside))

    async def open(self, run: Run, path: str, only: str = "") -> tuple[Parts, int]:
        """(its bytes, how many) of the output that `listing` shows. `RacimoError` output-missing, node-unknown,
        unreachable if it may lie on a node that does not answer."""
        missing: RacimoError | None = None
        away: list[str] = []
        for node in await self._nodes(run, only):
            try:
                if self._is_here(node):
                    fd, size_bytes = await asyncio.to_thread(open_output, self._home.output_dir(run.id), path)
                    return read_parts(fd, size_bytes), size_bytes
                first = await self._chunk(node, ReadOutput(run=run.id, path=path, limit=CHUNK_BYTES))
                return self._chunks(node, run.id, path, first), first.size_bytes
            except RacimoError as error:
                if error.code in AWAY:
                    away.append(node)
                elif error.code == "output-missing":
                    missing = missing or error
                else:
                    raise
        if away:
            names = ", ".join(away)
            raise RacimoError(
                "unreachable", f"no output {path!r} on the nodes that answer; {names} does not", "racimo nodes"
            )
        raise missing or RacimoError("output-missing", f"there is no output {path!r}", f"racimo get {run.id}")

    async def _nodes(self, run: Run, only: str) -> list[str]:
        """Where it may be, the node first that counts most."""
        nodes = by_weight(run, await self._loop.records(run.id))
        here = self._carrier.local_node
        if not any(self._is_here(node) for node in nodes):
            nodes.append(here)  # such as what an older attempt's node has sent here
        if not only:
            return nodes
        if only not in nodes:
            raise RacimoError("node-unknown", f"{run.id} was never on node {only!r}", f"racimo show {run.id}")
        return [only]

    def _is_here(self, node: str) -> bool:
        return node in ("", self._carrier.local_node)

    async def _list_on(self, run: str, node: str) -> OutputList | None:
        """None if the node does not answer."""
        if self._is_here(node):
            here = await asyncio.to_thread(list_outputs, self._home.output_dir(run))
            beside = await asyncio.to_thread(files_beside, self._home, run)
            return OutputList(files=tuple(here), beside=tuple(beside))
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                reply = await self._ask(node, ListOutputs(run=run))
        except TimeoutError:
            return None
        except RacimoError as error:
            if error.code not in AWAY:
                raise
            return None
        assert isinstance(reply, OutputList)
        return reply

    async def _ask(self, node: str, body: ListOutputs | ReadOutput) -> object:
        if node not in self._carrier.connected_nodes:
            raise RacimoError("unreachable", f"node {node} does not answer", "racimo nodes")
        return await self._carrier.request(node, body)

    async def _chunk(self, node: str, body: ReadOutput) -> OutputChunk:
        reply = await self._ask(node, body)
        assert isinstance(reply, OutputChunk)
        return reply

    async def _chunks(self, node: str, run: str, path: str, first: OutputChunk) -> Parts:
        """The whole file, the next piece already under way while one is passed on."""
        chunk, offset = first, 0
        following: asyncio.Task[OutputChunk] | None = None
        try:
            while offset < first.size_bytes:
                offset += len(chunk.content)
                if not chunk.content or chunk.size_bytes < first.size_bytes:
                    raise OSError("an output became shorter while it was read")
                if offset < first.size_bytes:
                    body = ReadOutput(run=run, path=path, offset=offset, limit=CHUNK_BYTES)
                    following = asyncio.create_task(self._chunk(node, body))
                # What was written behind the size that was announced does not belong to this answer.
                yield chunk.content[: len(chunk.content) - max(0, offset - first.size_bytes)]
                if following is not None:
                    chunk, following = await following, None
        finally:
            if following is not None:
                following.cancel()


def by_weight(run: Run, records: Iterable[Record]) -> list[str]:
    """The nodes of a run: those of its newest attempt first, in the order of their lowest rank there; a worker that is
    gone ranks behind those that live or have finished."""
    newest: dict[str, tuple[int, bool, int]] = {}
    for record in records:
        event = record.event
        if not isinstance(event, AttemptPlanned | WorkersPlanned):
            continue
        for place in event.placements:
            worker = run.workers.get(place.index) if event.attempt == run.attempt else None
            gone = worker is None or (worker.exit is not None and worker.exit.outcome != "finished")
            weight = (-event.attempt, gone, place.index)
            newest[place.node] = min(newest.get(place.node, weight), weight)
    return sorted(newest, key=newest.__getitem__)


async def read_parts(fd: int, size_bytes: int) -> Parts:
    """The first `size_bytes` of an open file, which is closed at the end."""
    try:
        offset = 0
        while offset < size_bytes:
            part = await asyncio.to_thread(os.pread, fd, min(READ_BYTES, size_bytes - offset), offset)
            if not part:
                raise OSError("an output became shorter while it was read")
            offset += len(part)
            yield part
    finally:
        os.close(fd)
