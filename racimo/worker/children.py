"""What a forked child (a data-loading process, mostly) must not keep of its parent, the worker.

Peers and the agent learn of a worker's end by the end of its connections; a child that holds a copy would delay that.
"""

import os
import socket

_connections: set[socket.socket] = set()


def close_in_children(connection: socket.socket) -> None:
    """From now on children forked by this process close their copy of the connection at once."""
    _connections.add(connection)


def drop(connection: socket.socket) -> None:
    """Closes a connection and forgets it."""
    _connections.discard(connection)
    connection.close()


def _close_all() -> None:
    for connection in _connections:
        connection.close()
    _connections.clear()


os.register_at_fork(after_in_child=_close_all)
