"""Serves the API on loopback: uvicorn without its ten ticks a second, on a port that stays the same."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from racimo.control.gate import App

HOST = "127.0.0.1"
BACKLOG = 512
MAX_CONNECTIONS = 256
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

    def protocol(self) -> asyncio.Protocol:
        """For a connection that somebody else accepted. It counts among this server's, which need not serve itself."""
        if not self.config.loaded:
            self.config.load()
        kind = self.config.http_protocol_class
        return kind(config=self.config, server_state=self.server_state, app_state={})  # type: ignore[call-arg]

    def drop(self) -> None:
        """Ends what came by `protocol`: idle connections at once, requests with what they are at."""
        for connection in list(self.server_state.connections):
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
