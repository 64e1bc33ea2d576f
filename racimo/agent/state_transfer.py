"""The saved state of a trial on its way from one node's agent to another's: one file, whole or not at all."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from racimo.agent.frames import FrameError, encode_frame
from racimo.agent.kept import DRAFT_SUFFIX, Kept, drop_others, is_kept_name, newest_kept, rounds_of, trial_folder
from racimo.agent.outputs import check_run_name
from racimo.agent.peer_client import STALL_S, Peer, connect
from racimo.agent.peer_protocol import ContentMissing, GetState, Piece, StateBegins
from racimo.agent.protocol import PeerAddress
from racimo.spec.errors import RacimoError

PIECE_BYTES = 2**20
MAX_STATE_BYTES = 1 << 40


async def send(ask: GetState, output_dir: Callable[[str], Path], writer: asyncio.StreamWriter) -> None:
    """Answers another agent. What the trial's worker puts in place of the file meanwhile does not change it."""
    try:
        check_run_name(ask.run)
        kept = await asyncio.to_thread(newest_kept, trial_folder(output_dir(ask.run), ask.trial))
        if kept is None or kept.rounds < ask.least:
            raise RacimoError("not-found", f"trial {ask.trial} of {ask.run} has no state here of {ask.least} rounds")
        file = await asyncio.to_thread(open, kept.path, "rb", 0)
    except (RacimoError, FileNotFoundError) as error:
        writer.write(encode_frame(ContentMissing(sha256="", message=str(error))))
        await writer.drain()
        return
    with contextlib.closing(file):
        size_bytes = os.fstat(file.fileno()).st_size
        writer.write(encode_frame(StateBegins(name=kept.path.name, size_bytes=size_bytes)))
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            writer.write(encode_frame(Piece(content=piece)))
            await writer.drain()
    await writer.drain()


async def fetch(address: PeerAddress, key: bytes, run: str, trial: int, least: int, folder: Path) -> Kept | None:
    """Gets it from there into `folder`, where it takes the place of an older one. None if it is not there or the way is
    broken, which is said. `OSError` if the disk here does not take it."""
    try:
        async with connect(address, key) as peer:
            return await _receive(peer, GetState(run=run, trial=trial, least=least), folder)
    except RacimoError as error:
        print(f"agent: {error.message}", file=sys.stderr)
    except (FrameError, ConnectionError, TimeoutError) as error:
        print(f"agent: the state of trial {trial} of {run} broke off: {error!r}", file=sys.stderr)
    return None


async def _receive(peer: Peer, ask: GetState, folder: Path) -> Kept | None:
    await peer.say(ask)
    begins = await peer.hear(STALL_S)
    if isinstance(begins, ContentMissing):
        return None
    if not isinstance(begins, StateBegins) or not is_kept_name(begins.name) or begins.size_bytes > MAX_STATE_BYTES:
        raise FrameError(f"asked for a state, {peer.address.node} answers {str(begins)[:100]}")
    await asyncio.to_thread(folder.mkdir, 0o700, True, True)
    target = folder / begins.name
    draft = target.with_name(target.name + DRAFT_SUFFIX)
    try:
        with open(draft, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            await _take_pieces(peer, begins.size_bytes, file)
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    await asyncio.to_thread(drop_others, folder, target)
    return Kept(rounds_of(begins.name), target)


async def _take_pieces(peer: Peer, size_bytes: int, file: BinaryIO) -> None:
    received = 0
    while received < size_bytes:
        piece = await peer.hear(STALL_S)
        if not isinstance(piece, Piece) or not piece.content:
            raise FrameError(f"the state broke off at {received} of {size_bytes} bytes")
        received += len(piece.content)
        await asyncio.to_thread(file.write, piece.content)
