"""What one node's agent does for and with the others': contents passed on, ways measured, modules looked up."""

import asyncio
import contextlib
import errno
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from racimo.act import tls
from racimo.agent import peer_client, state_transfer
from racimo.agent.arrivals import Arrivals
from racimo.agent.blobs import BlobStore
from racimo.agent.environments import EnvironmentFailed, Environments
from racimo.agent.find_modules import missing_modules
from racimo.agent.kept import Kept
from racimo.agent.peer_protocol import MAX_SINK_BYTES, peer_key
from racimo.agent.peer_server import PeerServer
from racimo.agent.protocol import (
    FetchBlobs,
    FindModules,
    ModulesReply,
    Ok,
    PeerAddress,
    ProbePeer,
    PutBlob,
    PutBlobPart,
    ReplyBody,
)
from racimo.spec.config import parse_token
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.spec.quantity import format_size
from racimo.state.nouns import Node

MAX_MODULES = 1_000
CERTIFICATE_FILE, KEY_FILE = "peer.pem", "peer.key"


class Serving(msgspec.Struct, frozen=True):
    """Where this agent serves other agents: `Node.address`, `peer_port` and `peer_pin`. Port 0: nowhere."""

    address: str
    port: int
    pin: str

    def of(self, node: Node) -> Node:
        """The node as others are to know it."""
        return msgspec.structs.replace(node, address=self.address, peer_port=self.port, peer_pin=self.pin)


class Neighbours:
    """`answers`: handlers by the request's type, for the agent's table."""

    def __init__(self, home: Home, blobs: BlobStore, environments: Environments) -> None:
        self._home, self._environments = home, environments
        self._arrivals = Arrivals(blobs)
        self._server: PeerServer | None = None
        self._serving: Serving | None = None
        self._opening = asyncio.Lock()
        self.answers: dict[type, Callable[[Any], Awaitable[ReplyBody]]] = {
            PutBlob: self._put_blob,
            PutBlobPart: self._put_part,
            FetchBlobs: self._fetch,
            ProbePeer: self._probe,
            FindModules: self._find_modules,
        }

    async def serve_at(self, address: str) -> Serving:
        """Begins to serve other agents at this IP address; moves there if it served at another. Where no port can be
        had, the node is known without one, which `racimo check` shows."""
        async with self._opening:
            if self._serving is None or self._serving.address != address or self._serving.port == 0:
                await self._close_server()
                self._serving = await self._open(address)
            return self._serving

    async def _open(self, address: str) -> Serving:
        folder = self._home.node_dir
        certificate, key = folder / CERTIFICATE_FILE, folder / KEY_FILE
        try:
            names = (address, socket.gethostname())
            pem = await asyncio.to_thread(tls.ensure_certificate, certificate, key, names)
            pin = tls.pin_of(pem)
            context = tls.server_context(certificate, key, ())
            server = PeerServer(folder, context, pin, self._key(), self._arrivals, self._home.output_dir)
            port = await server.listen(address)
        except (OSError, RacimoError) as error:
            print(f"agent: cannot serve other agents at {address}: {error}", file=sys.stderr)
            return Serving(address, 0, "")
        self._server = server
        return Serving(address, port, pin)

    async def _close_server(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None

    async def close(self) -> None:
        await self._close_server()
        self._arrivals.close()

    async def fetch_state(self, peer: PeerAddress, run: str, trial: int, least: int, folder: Path) -> Kept | None:
        """The saved state of a trial from another node, if it holds at least so many rounds; put into `folder`. None,
        and a line about it, if it cannot be had. `OSError` if the disk here does not take it."""
        return await state_transfer.fetch(peer, self._key(), run, trial, least, folder)

    def _key(self) -> bytes:
        try:
            return peer_key(parse_token(self._home.token_file.read_text()).secret)
        except OSError as error:
            raise RacimoError("unauthorized", f"the cluster's token cannot be read here: {error.strerror}") from error

    # What control asks

    async def _put_blob(self, message: PutBlob) -> ReplyBody:
        with _naming_a_full_disk(len(message.content)):
            await self._arrivals.put(message.sha256, message.content)
        return Ok()

    async def _put_part(self, message: PutBlobPart) -> ReplyBody:
        with _naming_a_full_disk(message.total_bytes):
            await self._arrivals.add_part(message.sha256, message.offset, message.total_bytes, message.content)
        return Ok()

    async def _fetch(self, message: FetchBlobs) -> ReplyBody:
        return await peer_client.fetch_contents(message.source, self._key(), message.sha256s, self._arrivals)

    async def _probe(self, message: ProbePeer) -> ReplyBody:
        size_bytes = min(message.size_bytes, MAX_SINK_BYTES)
        return await peer_client.probe(message.peer, self._key(), message.round_trips, size_bytes)

    async def _find_modules(self, message: FindModules) -> ReplyBody:
        if len(message.modules) > MAX_MODULES:
            raise RacimoError("invalid-request", f"{len(message.modules)} modules, at most {MAX_MODULES} at once")
        try:
            environment = await self._environments.get(message.requirements)
        except EnvironmentFailed as error:
            failure = error.failure
            raise RacimoError(failure.code, failure.message, failure.hint) from error
        return ModulesReply(missing=await missing_modules(environment, message.modules))


@contextlib.contextmanager
def _naming_a_full_disk(size_bytes: int) -> Iterator[None]:
    """The host belongs to the error: the run has others."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        host = socket.gethostname()
        message = f"{host} has no room for a file of the run of {format_size(size_bytes)}: {error.strerror}"
        raise RacimoError("disk-full", message, f"df -h   # on {host}") from error
