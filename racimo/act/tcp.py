"""How long the kernel believes in a connection between two machines."""

import socket

DEAD_PEER_MS = 2_500
"""Sent data that stays unacknowledged for this long, or probes that do, mean that the connection is dead."""
PROBE_AFTER_S = 2
PROBE_EVERY_S = 1
PATIENT_DEAD_PEER_MS = 60_000
"""For those who may well be away for a moment, such as a laptop whose user follows a run."""


def drop_when_dead(link: socket.socket, dead_peer_ms: int = DEAD_PEER_MS) -> None:
    """Lets the kernel end this TCP connection within about that time of the other side's silence."""
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(PROBE_AFTER_S, dead_peer_ms // 4_000)),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, dead_peer_ms),
    ):
        link.setsockopt(level, option, value)
