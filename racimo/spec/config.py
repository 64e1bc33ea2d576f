"""What a home says of its machine's place in a cluster: `config.json`, `join.json`, `cluster.json`; and tokens."""

import ipaddress
import re
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

DEFAULT_PORT = 7700
CarrierKind = Literal["link", "ray"]
_PIN = re.compile(r"[0-9a-f]{64}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_T = TypeVar("_T")


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`config.json`, as `racimo up` or `racimo join` was told. `slots` None: as many as the machine has cores. `price`
    per device-hour. `bind`: `IP:PORT` at which other machines reach the control process, "" for nobody. `carrier`: what
    brings and watches machines besides the links of the agents."""

    slots: int | None = None
    price: float = 0.0
    bind: str = ""
    carrier: CarrierKind = "link"


class JoinConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`join.json` on a machine that joined: where its agent dials to (`IP:PORT`), the cluster's id, and at which IP
    others reach this machine ("": the one that it shows to the head)."""

    address: str
    cluster: str
    address_of_this_node: str = ""
    carrier: CarrierKind = "link"


class ClusterFile(msgspec.Struct, frozen=True):
    """`cluster.json`: how clients find the cluster."""

    id: str
    address: str
    version: str


class LinkState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`node/link.json`, written by a joined machine's agent whenever `state` or `code` changes. up: linked to the
    control process. away: it cannot be reached. refused: it does not take this machine. `since_wall_s` is for people;
    `code`, `message` and `hint` are an error's of `spec.errors`."""

    state: Literal["up", "away", "refused"]
    since_wall_s: float
    head: str
    code: str = ""
    message: str = ""
    hint: str = ""


class Token(msgspec.Struct, frozen=True):
    """The cluster's secret, and the SHA-256 (hex) of the certificate of its head; "" where it serves loopback alone."""

    secret: str
    pin: str = ""

    def __str__(self) -> str:
        return f"{self.secret}:{self.pin}" if self.pin else self.secret


def parse_token(text: str) -> Token:
    """`SECRET` or `SECRET:PIN`. `RacimoError` unauthorized for a text that can be no token."""
    secret, colon, pin = text.strip().partition(":")
    if not secret or any(character.isspace() for character in secret) or (colon and not _PIN.fullmatch(pin)):
        raise RacimoError(
            "unauthorized",
            "this is not a token: it is one word, or SECRET:PIN with 64 hexadecimal digits as PIN",
            "racimo up   # on the head shows the line to paste",
        )
    return Token(secret, pin)


def parse_address(text: str, *, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """`10.0.0.1`, `10.0.0.1:7700`, `head.example`, `[::1]:7700`, `::1`. `RacimoError` invalid-request."""
    text = text.strip()
    if _is_ipv6(text):
        text = f"[{text}]"
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        port = port.removeprefix(":")
        sound = bool(host and bracket) and all(character in "0123456789abcdefABCDEF:." for character in host)
    else:
        host, _, port = text.partition(":")
        sound = _HOST.fullmatch(host) is not None
    if not sound or not re.fullmatch(r"[0-9]{0,5}", port) or not 0 < int(port or default_port) < 65536:
        raise RacimoError("invalid-request", f"an address is IP or IP:PORT such as 10.0.0.1:7700, not {text[:100]!r}")
    return host, int(port or default_port)


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6 and "%" not in text
    except ValueError:
        return False


def join_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_config(home: Home) -> ClusterConfig:
    """`RacimoError` start-failed for a file that is not as written or cannot be read; one not there is all defaults."""
    return _read(home.config_file, ClusterConfig) or ClusterConfig()


def read_join(home: Home) -> JoinConfig | None:
    """None on a machine that has not joined another's cluster. `RacimoError` as `read_config`."""
    return _read(home.join_file, JoinConfig)


def _read(path: Path, kind: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RacimoError("start-failed", f"cannot read {path}: {error.strerror}", f"ls -ld {path.parent}") from None
    except msgspec.MsgspecError as error:
        raise RacimoError("start-failed", f"{path} is not as written: {error}") from None
