"""Which of this machine's network interfaces carries an address: the one that collectives are to use.

Left alone, Gloo takes the interface of the host's name and NCCL the first that it likes, which on a machine with two
networks is silently the wrong one (accelerate#2362, #2818).
"""

import errno
import ipaddress
import socket
from collections.abc import Mapping

SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def interface_of(address: str) -> str | None:
    """The name of the interface with this IP address; None if no interface has it."""
    import psutil  # only where an attempt spans machines

    wanted = ipaddress.ip_address(address)
    for name, found in psutil.net_if_addrs().items():
        for one in found:
            # A link-local address comes with its zone behind a percent sign.
            is_ip = one.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and ipaddress.ip_address(one.address.partition("%")[0]) == wanted:
                return str(name)
    return None


def listens_already(address: str, port: int) -> bool:
    """Whether somebody has this TCP port already, so that rank 0 could not serve its store there.

    `OSError` if the port cannot be tried at all, such as on an address that this machine does not have."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        # As a store would: a connection of a moment ago that is still timing out is in nobody's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return True
    return False


def socket_variables(interface: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What names `interface` to Gloo, NCCL and TensorPipe. What the agent was itself started with counts more, as long
    as such an interface exists here."""
    known = [name for _, name in socket.if_nameindex()]
    chosen = {}
    for name in SOCKET_VARIABLES:
        given = environment.get(name, "")
        # NCCL takes lists, prefixes and exclusions: `=eth0`, `^lo,docker`, `eth`.
        words = given.lstrip("=^").split(",")
        fits = bool(given) and any(have.startswith(word.partition(":")[0]) for word in words for have in known)
        chosen[name] = given if fits else interface
    return chosen
