"""At which address other machines reach this one: checked before anything is changed, and what to paste there."""

import errno
import ipaddress
import os
import shlex
import socket

from racimo.spec.config import Token, join_address, parse_address, read_config
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home


def checked_bind(text: str) -> str:
    """`IP[:PORT]` or a name of this machine, as `IP:PORT`. `RacimoError` invalid-request for what nobody can dial."""
    host, port = parse_address(text)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        except OSError as error:
            raise RacimoError("invalid-request", f"--bind: {host!r} has no address: {error.strerror}") from None
        address = ipaddress.ip_address(found)
    if address.is_unspecified:
        raise RacimoError(
            "invalid-request",
            f"--bind {host} would be every network of this machine; name the one address that the others should use:"
            f" {own_addresses_words()}",
            f"racimo up --bind {likely_address()}",
        )
    return join_address(str(address), port)


def check_bind(home: Home, bind: str) -> None:
    """`RacimoError`: invalid-request if the address is none of this machine's, start-failed if the port is used."""
    host, port = parse_address(bind)
    if host not in {address for _, address in own_addresses()} and not ipaddress.ip_address(host).is_loopback:
        raise RacimoError(
            "invalid-request",
            f"{host} is no address of this machine (the wrong network interface?); it has {own_addresses_words()}",
            f"racimo up --bind {likely_address()}",
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
            trial.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and _is_own(home, host, port):
                return
            raise _cannot_listen(bind, error) from None


def _cannot_listen(bind: str, error: OSError) -> RacimoError:
    host, port = parse_address(bind)
    if error.errno != errno.EADDRINUSE:
        return RacimoError("start-failed", f"cannot listen at {bind}: {error.strerror}", f"racimo up --bind {host}")
    holder = _holder_of(port)
    words = f"process {holder[0]} ({holder[1]})" if holder else "another program"
    return RacimoError(
        "start-failed",
        f"port {port} at {host} is used by {words}",
        f"racimo up --bind {join_address(host, port + 10 if port < 65000 else port - 10)}",
    )


def _is_own(home: Home, host: str, port: int) -> bool:
    """Whether this home's control process holds that port."""
    from racimo.act.guardian import read_live

    record, holder = read_live(home.root, "control"), _holder_of(port)
    return record is not None and holder is not None and holder[0] == record.pid


def _holder_of(port: int) -> tuple[int, str] | None:
    """(pid, name) of who listens on that port, as far as this user may see."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return connection.pid, psutil.Process(connection.pid).name()
    except (psutil.Error, OSError):
        pass  # not for this user to see: the message does without a name
    return None


def own_addresses() -> list[tuple[str, str]]:
    """(interface, IP address) of this machine, those for others first."""
    import psutil

    found = []
    for interface, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6) and "%" not in one.address:
                found.append((interface, one.address))
    return sorted(found, key=lambda pair: (ipaddress.ip_address(pair[1]).is_loopback, ":" in pair[1]))


def own_addresses_words() -> str:
    found = [pair for pair in own_addresses() if not ipaddress.ip_address(pair[1]).is_loopback]
    return ", ".join(f"{address} ({interface})" for interface, address in found) or "none but loopback"


def likely_address() -> str:
    """The address from which most others are reached: that of the default route, else the first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            found = own_addresses()
            return found[0][1] if found else "127.0.0.1"


def join_line(home: Home) -> str:
    """What to paste on another machine; "" where none can reach this one. The secret never is an argument: `echo` is
    the shell's own. Quoted where a shell would take the brackets of IPv6 for a pattern."""
    bind = read_config(home).bind
    if not bind:
        return ""
    return f"echo {shared_token(home)} | racimo join {shlex.quote(bind)} --token-file -"


def shared_token(home: Home) -> Token:
    """The head's token as other machines need it, with the pin of its certificate. `RacimoError` start-failed."""
    from racimo.act.tls import pin_of
    from racimo.spec.config import parse_token

    try:
        secret = parse_token(home.token_file.read_text()).secret
        return Token(secret, pin_of(home.certificate_file.read_bytes()))
    except OSError as error:
        raise RacimoError("start-failed", f"cannot read {error.filename}: {os.strerror(error.errno or 0)}") from None
