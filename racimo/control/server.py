"""Serves the API on loopback: uvicorn without its ten ticks a second, on a port that stays the same."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from racimo.control.gate import App

HOST = "127.0.0.1"
BACKLOG = 512
MAX_CONNECTIONS = 256
MAX_CONNECTIONS_OF_ADDRESS = 128
"""Of those that come by `Server.protocol`: one machine alone does not keep the others out."""
MAX_SURPLUS = 128
"""So many more are told that the cluster is busy, before others are just dropped."""
KEEP_ALIVE_S = 120
END_STREAMS_S = 1
MAX_HEADER_BYTES = 32 * 1024

log = logging.getLogger("racimo.control.server")


def listen(port: int) -> socket.socket:
    """A listening socket on `port` if it is free (0: any), else on another."""
    for wanted in (port, 0):
        # The protocol said, else asyncio takes the connections for something without Nagle's algorithm to turn off,
        # and every answer waits 40 ms for the client's acknowledgement of its headers.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, wanted))
        except OSError as error:
            listener.close()
            if wanted == 0:
                raise
            log.warning("port %d is taken (%s): using another", wanted, error.strerror)
            continue
        listener.setblocking(False)
        return listener
    raise AssertionError("unreachable: port 0 either binds or raises")


class Server(uvicorn.Server):
    """Ends when `stop` is called; leaves signals alone."""

    def __init__(self, app: App) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                interface="asgi3",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=END_STREAMS_S,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            )
        )
        self._stop = asyncio.Event()
        self._surplus = ServerState()

    def protocol(self, address: str) -> H11Protocol | None:
        """For a connection that somebody else accepted from that IP. It counts among this server's, which need not
        serve itself. One beyond the bounds hears that the cluster is busy; None if even those are too many."""
        if not self.config.loaded:
            self.config.load()
        own = [one for one in self.server_state.connections if _address_of(one) == address]
        if len(own) < MAX_CONNECTIONS_OF_ADDRESS and len(self.server_state.connections) < MAX_CONNECTIONS - 1:
            return H11Protocol(config=self.config, server_state=self.server_state, app_state={})
        if len(self._surplus.connections) >= MAX_SURPLUS:
            return None
        protocol = H11Protocol(config=self.config, server_state=self._surplus, app_state={})
        protocol.limit_concurrency = 0  # any request is one too many
        return protocol

    def drop(self) -> None:
        """Ends what came by `protocol`: idle connections at once, requests with what they are at."""
        for connection in [*self.server_state.connections, *self._surplus.connections]:
            connection.shutdown()
        for task in list(self.server_state.tasks):
            task.cancel()

    def stop(self) -> None:
        self.should_exit = True
        self._stop.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._stop.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _address_of(connection: object) -> str:
    client = getattr(connection, "client", None)
    return str(client[0]) if client else ""
