"""Contents that come in piece by piece, and their reading while they do: a chain of nodes passes one on meanwhile."""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncGenerator
from pathlib import Path

from racimo.agent.blobs import BlobStore, Draft
from racimo.agent.pulse import Pulse
from racimo.spec.errors import RacimoError

PIECE_BYTES = 2**20
SHA256 = re.compile(r"[0-9a-f]{64}")
QUIET_S = 10.0
"""How long who waits for a content goes on waiting while nothing at all comes in here."""
MAX_CONTENT_BYTES = 4 * 10**9
MAX_ARRIVING = 1_024


class Arrival:
    """One content on its way: what has come is in `draft`."""

    def __init__(self, draft: Draft, total_bytes: int) -> None:
        self.draft = draft
        self.total_bytes = total_bytes
        self.turn = asyncio.Lock()
        """Pieces are written in the order in which they came."""
        self.over = False


class Arrivals:
    """All contents on their way into one store. For one event loop; the disk is touched in threads."""

    def __init__(self, store: BlobStore) -> None:
        self.store = store
        self._arriving: dict[str, Arrival] = {}
        self._changed = Pulse()

    def begin(self, sha256: str, total_bytes: int) -> Arrival:
        """Starts a content anew; an earlier try ends. `RacimoError` beyond the bounds."""
        if not 0 <= total_bytes <= MAX_CONTENT_BYTES:
            raise RacimoError("upload-too-large", f"a content has at most {MAX_CONTENT_BYTES} bytes, not {total_bytes}")
        _check_name(sha256)
        earlier = self._arriving.get(sha256)
        if earlier is not None:
            self._end(sha256, earlier)
        if len(self._arriving) >= MAX_ARRIVING:
            raise RacimoError("busy", f"{MAX_ARRIVING} contents are on their way already")
        arrival = Arrival(self.store.draft(sha256), total_bytes)
        self._arriving[sha256] = arrival
        self._changed.beat()
        return arrival

    async def add(self, sha256: str, arrival: Arrival, piece: bytes, offset: int | None = None) -> None:
        """Writes the next piece; with the last one the content is verified and there.

        `RacimoError` if it is not what its name says, or the piece is not the next; the arrival is over then."""
        async with arrival.turn:
            draft = arrival.draft
            try:
                if arrival.over:
                    raise RacimoError("invalid-request", f"content {sha256[:12]} is no longer expected")
                if (offset not in (None, draft.size_bytes)) or draft.size_bytes + len(piece) > arrival.total_bytes:
                    raise RacimoError(
                        "invalid-request",
                        f"of content {sha256[:12]} {draft.size_bytes} of {arrival.total_bytes} bytes are here;"
                        f" {len(piece)} at {offset} are not what follows",
                    )
                await asyncio.to_thread(draft.write, piece)
                if arrival.over:
                    raise RacimoError("unreachable", f"content {sha256[:12]} was given up while it arrived")
                if draft.size_bytes == arrival.total_bytes:
                    await asyncio.to_thread(draft.finish)
                    self._end(sha256, arrival)
            except BaseException:
                self._end(sha256, arrival)
                raise
            self._changed.beat()

    async def put(self, sha256: str, content: bytes) -> None:
        """A small content at once."""
        await asyncio.to_thread(self.store.put, sha256, content)
        self._changed.beat()

    async def add_part(self, sha256: str, offset: int, total_bytes: int, piece: bytes) -> None:
        """A piece by its place: the first (offset 0) begins the content anew."""
        arrival = self.begin(sha256, total_bytes) if offset == 0 else self._arriving.get(sha256)
        if arrival is None:
            raise RacimoError(
                "invalid-request", f"content {sha256[:12]} has not begun here, and {offset} is not its begin"
            )
        await self.add(sha256, arrival, piece, offset)

    def abandon(self, sha256: str, arrival: Arrival) -> None:
        """The rest will not come; nothing is left of it."""
        self._end(sha256, arrival)

    async def read(self, sha256: str, *, wait: bool = True) -> tuple[int, AsyncGenerator[bytes, None]]:
        """(size, pieces) of a content, as soon as it begins to arrive. The pieces may break off with `RacimoError`.

        `RacimoError` not-found once nothing at all has come in for `QUIET_S` and this is not here; at once without
        `wait`."""
        _check_name(sha256)
        while True:
            arrival = self._arriving.get(sha256)
            if arrival is not None:
                return arrival.total_bytes, self._pieces(sha256, arrival)
            try:
                path = self.store.path(sha256)
                return path.stat().st_size, _file_pieces(path)
            except FileNotFoundError:
                pass  # not yet
            if not wait or not await self._changed.wait(QUIET_S):
                raise RacimoError("not-found", f"content {sha256[:12]} is not here and nothing is on its way")

    async def _pieces(self, sha256: str, arrival: Arrival) -> AsyncGenerator[bytes, None]:
        draft = arrival.draft
        offset = 0
        try:
            fd = os.open(draft.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # complete meanwhile
            fd = os.open(self.store.path(sha256), os.O_RDONLY | os.O_CLOEXEC)
        try:
            while offset < arrival.total_bytes:
                there = min(draft.size_bytes - offset, PIECE_BYTES)
                if there > 0:
                    piece = await asyncio.to_thread(os.pread, fd, there, offset)
                    offset += len(piece)
                    yield piece
                elif arrival.over or not await self._changed.wait(QUIET_S):
                    raise RacimoError("not-found", f"content {sha256[:12]} broke off at {offset} bytes")
        finally:
            os.close(fd)

    def _end(self, sha256: str, arrival: Arrival) -> None:
        if not arrival.over:
            arrival.over = True
            arrival.draft.discard()
        if self._arriving.get(sha256) is arrival:
            del self._arriving[sha256]
        self._changed.beat()

    def close(self) -> None:
        for sha256, arrival in list(self._arriving.items()):
            self._end(sha256, arrival)


def _check_name(sha256: str) -> None:
    """It becomes a file's name: nothing else may."""
    if not SHA256.fullmatch(sha256):
        raise RacimoError("invalid-request", f"a content's name is its SHA-256, not {sha256[:80]!r}")


async def _file_pieces(path: Path) -> AsyncGenerator[bytes, None]:
    size_bytes = path.stat().st_size
    if size_bytes <= PIECE_BYTES:
        if size_bytes:
            yield await asyncio.to_thread(path.read_bytes)
        return
    with contextlib.closing(await asyncio.to_thread(open, path, "rb", 0)) as file:
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece
