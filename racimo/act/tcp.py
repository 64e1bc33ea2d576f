"""How long the kernel believes in a connection between two machines."""

import socket

DEAD_PEER_MS = 2_500
"""Sent data that stays unacknowledged for this long, or probes that do, mean that the connection is dead."""
PROBE_AFTER_S = 2
PROBE_EVERY_S = 1


def drop_when_dead(link: socket.socket) -> None:
    """Lets the kernel end this TCP connection within about 2.5 s of the other side's silence."""
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS),
    ):
        link.setsockopt(level, option, value)
