"""Takes TLS connections without letting strangers fill this process: who has not finished a handshake counts too.

asyncio's own servers take every connection and give each its buffers for TLS (some 80 kB) before anybody sees it.
"""

import asyncio
import errno
import socket
import ssl
from collections import Counter
from collections.abc import Callable

MAX_HANDSHAKES = 256
MAX_HANDSHAKES_OF_ADDRESS = 64
"""So that one machine alone cannot keep the others out."""
ACCEPT_AGAIN_S = 0.2
SHUTDOWN_TIMEOUT_S = 5.0
"""For what was still to be sent when a connection was closed, and for the other side's word that it heard it."""
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED})
"""Errors of accept that pass by themselves."""


class TlsListener:
    """`listener` listens already and does not block. `make_protocol`: for each connection, met after its handshake,
    for which `timeout_s` are given."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        timeout_s: float,
        *,
        most: int = MAX_HANDSHAKES,
        most_of_address: int = MAX_HANDSHAKES_OF_ADDRESS,
    ) -> None:
        self._listener, self._context, self._make_protocol = listener, context, make_protocol
        self._timeout_s, self._most, self._most_of_address = timeout_s, most, most_of_address
        self._of_address: Counter[str] = Counter()
        self._handshakes: set[asyncio.Task[None]] = set()
        self.num_turned_away = 0

    async def run(self) -> None:
        """Until cancelled; then nobody listens any more, and connections that were met go on. `OSError` if the listener
        fails for good."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, address = await loop.sock_accept(self._listener)
                except OSError as error:
                    if error.errno not in _PASSING:
                        raise
                    await asyncio.sleep(ACCEPT_AGAIN_S)  # nothing tells when a descriptor comes free
                    continue
                self._take(connection, address[0])
                await asyncio.sleep(0)  # accepting does not wait while there are more: handshakes have their turn
        finally:
            self._listener.close()
            for handshake in self._handshakes:
                handshake.cancel()
            await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _take(self, connection: socket.socket, host: str) -> None:
        if len(self._handshakes) >= self._most or self._of_address[host] >= self._most_of_address:
            connection.close()
            self.num_turned_away += 1
            return
        self._of_address[host] += 1
        handshake = asyncio.get_running_loop().create_task(self._shake_hands(connection, host), name="handshake")
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, connection: socket.socket, host: str) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol, connection, ssl=self._context,
                ssl_handshake_timeout=self._timeout_s, ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )  # fmt: skip
        except OSError:
            pass  # no TLS, or no end of it in time: a scanner, or a machine that went away, and worth no line in a log
        finally:
            self._of_address[host] -= 1
            if not self._of_address[host]:
                del self._of_address[host]
