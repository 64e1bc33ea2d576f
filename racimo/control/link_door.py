"""The cluster's one open port: TLS, and ALPN decides between agents' links and HTTPS for everybody else."""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import time
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable
from typing import cast

import msgspec

from racimo.act.agent_client import AgentClient
from racimo.act.tcp import PATIENT_DEAD_PEER_MS, drop_when_dead
from racimo.act.tls import ensure_head_certificate, server_context
from racimo.act.tls_listener import TlsListener
from racimo.agent.frames import FrameError, encode_frame, read_length
from racimo.agent.protocol import LINK_ALPN, LinkAccepted, LinkHello, Refused
from racimo.control.carrier import Carrier
from racimo.control.link_rules import House, elsewhere, refusal, twice
from racimo.spec.config import parse_address
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.version import __version__

BACKLOG = 4096
MAX_LINKS = 4096
MAX_UNMET, MAX_UNMET_OF_ADDRESS = 512, 256
"""Connections in their handshake, and links that have not shown yet that they belong here. One address may well be that
of two thousand agents, all of which dial at once when this process has begun; those turned away dial again."""
HELLO_TIMEOUT_S = 10.0
"""For the TLS handshake, then for the first words of a link or a first HTTP request."""
MAX_HELLO_BYTES = 2**20
"""An agent names every worker whose end it has not got acknowledged."""
SHORT_HELLO_BYTES = 32 * 1024
MAX_LONG_HELLOS = 16
"""So many longer ones are taken in at once, since whoever sends them may be anybody."""
READ_AHEAD_BYTES = 64 * 1024
TLS_BUFFER_BYTES = 32 * 1024
"""Of each connection; asyncio's own 256 KB would make half a GB of two thousand links."""
LISTEN_AGAIN_S = 1.0
BEAT_BUSY_S = 0.5
BEAT_IDLE_LEAST_S, BEAT_IDLE_MOST_S = 0.5, 30.0
BEATS_PER_S = 200
"""Of all idle agents together: they cost the control process a few hundredths of a core."""

_HELLO = msgspec.msgpack.Decoder(LinkHello)

log = logging.getLogger("racimo.control.link")


class LinkDoor:
    """`http`: makes the protocol of one HTTPS connection from that address, or None if there are too many."""

    def __init__(
        self, home: Home, carrier: Carrier, house: Callable[[], House], http: Callable[[str], asyncio.Protocol | None]
    ) -> None:
        self._home, self._carrier, self._house, self._http = home, carrier, house, http
        self._links: set[asyncio.Task[None]] = set()
        self._unmet: Counter[str] = Counter()
        self._long_hellos = asyncio.Semaphore(MAX_LONG_HELLOS)
        self.problem: RacimoError | None = None
        """Why nobody is listening, while nobody is."""

    async def run(self, bind: str) -> None:
        """Listens at `IP:PORT`, as soon as that can be had, until cancelled."""
        while True:
            try:
                context = self._context(bind)
                listener = _listen(bind)
                break
            except (OSError, RacimoError) as error:
                self._note(bind, error)
                await asyncio.sleep(LISTEN_AGAIN_S)  # nothing tells when an address or a port comes free
        self.problem = None
        sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
        door = TlsListener(
            listener, context, lambda: _Visitor(self), HELLO_TIMEOUT_S,
            most=MAX_UNMET, most_of_address=MAX_UNMET_OF_ADDRESS,
        )  # fmt: skip
        log.info("machines may join at %s", bind)
        try:
            await door.run()
        finally:
            for link in self._links:
                link.cancel()
            await asyncio.gather(*self._links, return_exceptions=True)

    def _context(self, bind: str) -> ssl.SSLContext:
        ensure_head_certificate(self._home, bind)
        return server_context(self._home.certificate_file, self._home.certificate_key_file)

    def _note(self, bind: str, error: OSError | RacimoError) -> None:
        if isinstance(error, OSError):
            why = error.strerror or str(error)
            hint = (
                "racimo check" if error.errno != errno.EADDRINUSE else f"ss -ltnp 'sport = :{bind.rpartition(':')[2]}'"
            )
            error = RacimoError("start-failed", f"nobody can join at {bind}: {why}", hint)
        if self.problem is None or self.problem.message != error.message:
            log.error("%s", error.message)
        self.problem = error

    def admit(self, transport: asyncio.Transport) -> asyncio.Protocol | None:
        """The protocol for a connection whose handshake is over; None if it is one too many."""
        wrapped = cast("ssl.SSLObject", transport.get_extra_info("ssl_object"))
        loop = asyncio.get_running_loop()
        if wrapped.selected_alpn_protocol() == LINK_ALPN:
            return asyncio.StreamReaderProtocol(asyncio.StreamReader(READ_AHEAD_BYTES, loop), self._enter, loop)
        drop_when_dead(transport.get_extra_info("socket"), PATIENT_DEAD_PEER_MS)
        protocol = self._http(_host_of(transport))
        if protocol is None:
            return None
        loop.call_later(HELLO_TIMEOUT_S, _drop_unused, protocol, transport)
        return protocol

    def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = _host_of(writer)
        too_many = self._unmet[host] >= MAX_UNMET_OF_ADDRESS or self._unmet.total() >= MAX_UNMET
        if too_many or len(self._links) >= MAX_LINKS:
            writer.transport.abort()
            return
        self._unmet[host] += 1
        link = asyncio.create_task(self._link(host, reader, writer), name="link")
        self._links.add(link)
        link.add_done_callback(self._links.discard)

    async def _link(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                hello = await self._meet(host, reader, writer)
            finally:
                self._unmet -= Counter({host: 1})
            if hello is None:
                return
            accepted = LinkAccepted(
                cluster=self._house().cluster, version=__version__, beat_busy_s=BEAT_BUSY_S, beat_idle_s=self._idle_s()
            )
            writer.write(encode_frame(accepted))
            await self._carrier.serve_link(AgentClient(reader, writer, hello.welcome))
        except (OSError, asyncio.IncompleteReadError, FrameError, msgspec.DecodeError) as error:
            log.warning("dropped a link from %s: %r", writer.get_extra_info("peername"), error)
        except Exception:
            log.exception("a link from %s ended by a fault of ours", writer.get_extra_info("peername"))
            raise
        finally:
            writer.transport.abort()

    async def _meet(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> LinkHello | None:
        """What it said, if it may be a node of this cluster. `OSError`, `FrameError`, `msgspec.DecodeError`."""
        drop_when_dead(writer.get_extra_info("socket"))
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            length = await read_length(reader, MAX_HELLO_BYTES)
            if length is None:
                return None
            async with self._long_hellos if length > SHORT_HELLO_BYTES else contextlib.nullcontext():
                body = await reader.readexactly(length)
        hello = _HELLO.decode(body)
        problem = refusal(hello, self._house(), time.time()) or self._refuse_other(hello)
        if problem is None:
            return hello
        log.warning("%s is refused: %s", host, problem.message)
        await self._refuse(writer, problem)
        return None

    async def _refuse(self, writer: asyncio.StreamWriter, problem: Refused) -> None:
        writer.write(encode_frame(problem))
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    def _refuse_other(self, hello: LinkHello) -> Refused | None:
        """Two agents of one node: the newest wins if it is the same one dialling anew. While the node is away, another
        machine with a copy of its home does not take its place."""
        node = hello.welcome.node
        earlier = self._carrier.client_of(node.id)
        if earlier is None or earlier.closed.is_set():
            return elsewhere(node, self._carrier.loop.core.state.nodes.get(node.id))
        return None if earlier.welcome.instance == hello.welcome.instance else twice(node)

    def _idle_s(self) -> float:
        num_nodes = len(self._carrier.loop.core.state.nodes)
        return min(BEAT_IDLE_MOST_S, max(BEAT_IDLE_LEAST_S, num_nodes / BEATS_PER_S))


class _Visitor(asyncio.Protocol):
    """A connection until its handshake has said what it is to be."""

    def __init__(self, door: LinkDoor) -> None:
        self._door = door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        protocol = self._door.admit(transport)
        if protocol is None:
            transport.abort()
            return
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


def _host_of(end: asyncio.Transport | asyncio.StreamWriter) -> str:
    """The other side's address; "" if it has left already."""
    peer = end.get_extra_info("peername")
    return str(peer[0]) if peer else ""


def _drop_unused(protocol: asyncio.Protocol, transport: asyncio.Transport) -> None:
    """A visitor that has not asked anything by now."""
    if getattr(protocol, "cycle", None) is None:
        transport.abort()


def _listen(bind: str) -> socket.socket:
    """A TCP socket bound to `IP:PORT`. `OSError`, `RacimoError`."""
    host, port = parse_address(bind)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
