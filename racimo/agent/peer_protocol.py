"""What agents say to each other: framed as in `protocol`, over TLS, one request at a time on a connection.

The server shows the certificate whose pin the control process gave out (`Node.peer_pin`) and says `PeerChallenge`. The
client proves with `PeerHello` that it knows the cluster's secret, the server does the same in `PeerWelcome` (or says
`Refused`). The proofs cover both nonces and the pin, so that neither can be passed on to another connection.

Then: `GetContents` is answered, per content and in the order asked for, with `ContentBegins` and as many `Piece`s as
its size takes, or with `ContentMissing` (which may also come instead of the next piece). `Echo` comes back as it is.
`Sink` is followed by pieces, an empty one last, and answered with `Sunk`. `GetState` is answered with `StateBegins` and
pieces, or with `ContentMissing`.
"""

import asyncio
import hashlib
import hmac
import socket
from typing import TypeVar

import msgspec

from racimo.agent.frames import FrameError
from racimo.agent.protocol import FRAME_HEADER

PEER_PROTOCOL = 2
NONCE_BYTES = 32
MAX_HELLO_BYTES = 4_096
MAX_ASK_BYTES = 8 * 2**20
"""Of one request: 100,000 contents by name."""
MAX_PIECE_BYTES = 2 * 2**20
MAX_ECHO_BYTES = 64 * 1024
MAX_SINK_BYTES = 256 * 10**6
BUFFER_BYTES = 4 * 2**20
"""What one connection keeps of pieces that nobody has taken yet."""
DEAD_AFTER_S = 4
"""What was sent, or the kernel's own probe of an idle connection, and is not acknowledged for so long ends it."""

T = TypeVar("T")


class _Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=True):
    pass


class PeerChallenge(_Message, frozen=True, kw_only=True):
    protocol: int
    nonce: bytes


class PeerHello(_Message, frozen=True, kw_only=True):
    protocol: int
    nonce: bytes
    proof: bytes


class PeerWelcome(_Message, frozen=True, kw_only=True):
    proof: bytes


class PeerRefused(_Message, frozen=True, kw_only=True):
    code: str
    message: str


class GetContents(_Message, frozen=True, kw_only=True):
    sha256s: tuple[str, ...]


class ContentBegins(_Message, frozen=True, kw_only=True):
    sha256: str
    size_bytes: int


class Piece(_Message, frozen=True, kw_only=True):
    content: bytes = b""


class ContentMissing(_Message, frozen=True, kw_only=True):
    """`message`: why."""

    sha256: str
    message: str = ""


class GetState(_Message, frozen=True, kw_only=True):
    """The newest saved state of a trial, if it holds at least `least` rounds."""

    run: str
    trial: int
    least: int = 0


class StateBegins(_Message, frozen=True, kw_only=True):
    """`name`: of its file."""

    name: str
    size_bytes: int


class Echo(_Message, frozen=True, kw_only=True):
    content: bytes = b""


class Sink(_Message, frozen=True, kw_only=True):
    pass


class Sunk(_Message, frozen=True, kw_only=True):
    """`passed_s`: from the beginning to the last byte, as the receiver saw it."""

    size_bytes: int
    passed_s: float


Ask = GetContents | GetState | Echo | Sink
Answer = ContentBegins | StateBegins | Piece | ContentMissing | Echo | Sunk | PeerRefused


def peer_key(secret: str) -> bytes:
    """The key of all proofs between agents, from the cluster's secret."""
    return hmac.digest(secret.encode(), b"racimo peers", hashlib.sha256)


def proof(key: bytes, role: str, server_nonce: bytes, client_nonce: bytes, pin: str) -> bytes:
    """What only a holder of the key can say of this connection; `role` is `client` or `server`."""
    words = (role, server_nonce.hex(), client_nonce.hex(), pin)
    return hmac.digest(key, "|".join(words).encode(), hashlib.sha256)


async def read_message(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T], most_bytes: int) -> T | None:
    """The next message; None once the other side has closed. `FrameError` if it is longer or not what is expected."""
    try:
        (length,) = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
        if length > most_bytes:
            raise FrameError(f"a message of {length} bytes is longer than the {most_bytes} that may be sent here")
        return decoder.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except msgspec.DecodeError as error:
        raise FrameError(f"the other agent does not speak this protocol: {error}") from error


def notice_death(sock: socket.socket) -> None:
    """A connection whose other side vanished without a word ends within `DEAD_AFTER_S`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_AFTER_S // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)
