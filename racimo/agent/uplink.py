"""A joined machine's link to the control process: dialled, served, and dialled again for ever."""

import asyncio
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine

import msgspec

from racimo.act.tcp import drop_when_dead
from racimo.act.tls import client_context
from racimo.agent.answers import Answer, answer_requests, error_of
from racimo.agent.frames import FrameError, encode_frame, read_frame
from racimo.agent.lease import Lease
from racimo.agent.protocol import (
    LINK_ALPN,
    MAX_FRAME_BYTES,
    ControlWelcome,
    LinkAccepted,
    LinkHello,
    Refused,
)
from racimo.agent.whole_file import write_whole
from racimo.spec.config import JoinConfig, LinkState, parse_address, parse_token
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.version import PROTOCOL_VERSION

CONNECT_TIMEOUT_S = 1.5
"""For the TCP connection alone: a machine that is there answers at once."""
HELLO_TIMEOUT_S = 15.0
"""For TLS and the first answer: a control process that just started greets thousands."""
REDIAL_FIRST_S = 0.05
REDIAL_MOST_S = 1.0
REFUSED_PAUSE_S = 3.0
STABLE_AFTER_S = 1.0
"""A link that lived this long is dialled again at once when it breaks."""

_JOIN_ANEW = "racimo down   # then the line that racimo up shows on the head"

_FIRST_ANSWER = msgspec.msgpack.Decoder(LinkAccepted | Refused)

Beating = Callable[[asyncio.StreamWriter, LinkAccepted], Coroutine[None, None, None]]


class Uplink:
    """One link at a time. `welcome` introduces the node; it is asked anew for each link, after `linked_from` was told
    the IP from which this one was made."""

    def __init__(
        self,
        home: Home,
        join: JoinConfig,
        lease: Lease,
        *,
        welcome: Callable[[], ControlWelcome],
        answer: Answer,
        beat: Beating,
        linked_from: Callable[[str], Awaitable[None]],
    ) -> None:
        self._home, self._join, self._lease = home, join, lease
        self._welcome, self._answer, self._beat, self._linked_from = welcome, answer, beat, linked_from
        self._state: LinkState | None = None
        self._linked_at_s = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        delay_s = REDIAL_FIRST_S
        while True:
            self._linked_at_s = 0.0
            try:
                await self._link()
                self._note("away", RacimoError("unreachable", "the link to the control process broke"))
            except RacimoError as error:
                if error.code not in ("unreachable", "busy"):
                    self._note("refused", error)
                    await asyncio.sleep(REFUSED_PAUSE_S)
                    continue
                self._note("away", error)
            if 0 < self._linked_at_s < time.monotonic() - STABLE_AFTER_S:
                delay_s = REDIAL_FIRST_S
            await asyncio.sleep(delay_s)
            delay_s = min(REDIAL_MOST_S, delay_s * 2)

    async def _link(self) -> None:
        """One link from its dialling to its end. `RacimoError`: `unreachable`, or why it was refused."""
        reader, writer = await self._dial()
        try:
            accepted = await self._introduce(reader, writer)
            self._linked_at_s = time.monotonic()
            self._lease.renew()
            self._note("up")
            print(f"agent: linked to the control process at {self._join.address}", file=sys.stderr)
            beats = asyncio.create_task(self._beat(writer, accepted), name="beats")
            try:
                await answer_requests(reader, writer, self._answer, self._lease.renew)
            finally:
                beats.cancel()
        except (OSError, FrameError, msgspec.DecodeError) as error:
            raise RacimoError("unreachable", f"the link to {self._join.address} broke: {error}") from error
        finally:
            writer.transport.abort()  # a polite end would wait for a peer that may be gone

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = parse_address(self._join.address)
        loop = asyncio.get_running_loop()
        try:
            context = client_context(self._home.certificate_file.read_bytes(), (LINK_ALPN,))
        except (OSError, ssl.SSLError, ValueError) as error:
            message = f"{self._home.certificate_file} cannot be used: {error}"
            raise RacimoError("certificate-mismatch", message, _JOIN_ANEW) from error
        plain: socket.socket | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                plain = await _connect(loop, host, port)
            drop_when_dead(plain)
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                return await asyncio.open_connection(
                    sock=plain,
                    ssl=context,
                    server_hostname="",
                    limit=MAX_FRAME_BYTES,
                    ssl_handshake_timeout=HELLO_TIMEOUT_S,
                )
        except ssl.SSLCertVerificationError as error:
            message = f"{self._join.address} shows another certificate than the one pinned when this machine joined"
            raise RacimoError("certificate-mismatch", message, _JOIN_ANEW) from error
        except OSError as error:  # TimeoutError and SSLError are some
            if plain is not None:
                plain.close()
            why = "no answer" if isinstance(error, TimeoutError) else str(error.strerror or error)
            raise RacimoError("unreachable", f"no control process answers at {self._join.address}: {why}") from error

    async def _introduce(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> LinkAccepted:
        await self._linked_from(writer.get_extra_info("sockname")[0])
        hello = LinkHello(
            token=self._secret(),
            cluster=self._join.cluster,
            protocol=PROTOCOL_VERSION,
            wall_s=time.time(),
            welcome=self._welcome(),
        )
        writer.write(encode_frame(hello))
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            body = await read_frame(reader)
        if body is None:
            raise RacimoError("unreachable", f"{self._join.address} closed the link at once")
        answer = _FIRST_ANSWER.decode(body)
        if isinstance(answer, Refused):
            raise error_of(answer)
        return answer

    def _secret(self) -> str:
        try:
            return parse_token(self._home.token_file.read_text()).secret
        except OSError as error:
            raise RacimoError("unauthorized", f"{self._home.token_file}: {error.strerror}", _JOIN_ANEW) from error

    def _note(self, state: str, error: RacimoError | None = None) -> None:
        """For people: `node/link.json`, written when it says something new."""
        code, message, hint = (error.code, error.message, error.hint) if error is not None else ("", "", "")
        old = self._state
        if old is not None and (old.state, old.code) == (state, code):
            return
        since_s = old.since_wall_s if old is not None and old.state == state else time.time()
        new = LinkState(
            state=state,  # type: ignore[arg-type]
            since_wall_s=since_s, head=self._join.address, code=code, message=message, hint=hint,
        )  # fmt: skip
        self._state = new
        if error is not None:
            print(f"agent: {state}: {error.message} [{code}]", file=sys.stderr)
        try:
            write_whole(self._home.link_file, msgspec.json.encode(new))
        except OSError as problem:  # a full disk: the link itself needs none
            print(f"agent: cannot write {self._home.link_file.name}: {problem}", file=sys.stderr)


async def _connect(loop: asyncio.AbstractEventLoop, host: str, port: int) -> socket.socket:
    """A connected TCP socket, to the first of the host's addresses that answers. `OSError`."""
    problem: OSError | None = None
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        plain = socket.socket(family, kind, protocol)
        plain.setblocking(False)
        try:
            await loop.sock_connect(plain, address)
            return plain
        except OSError as error:
            plain.close()
            problem = error
        except BaseException:
            plain.close()
            raise
    raise problem or OSError(f"{host} has no address")


def own_address(towards: str) -> str:
    """The IP address that this machine would show to a host (a name or an IP); "" while there is no way to it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # chooses the source address; nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return ""
