"""Where the cluster is: `$RACIMO_ADDRESS`, else the one whose home this machine has, else a new one started here."""

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from racimo.act.guardian import read_live
from racimo.client.say import Say
from racimo.spec.config import ClusterFile, Token, join_address, parse_address, parse_token
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

if TYPE_CHECKING:
    from racimo.client.api import Client


_TOKEN_HINT = (
    "export RACIMO_TOKEN_FILE=FILE   # with SECRET:PIN of the line for join (racimo up on the head shows it); here, the"
    " file token in the home"
)


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An address and the secret for it. `home` is None where the cluster belongs to another machine or user.
    `certificate`: the one (PEM) that an https address must show; empty where the system's authorities decide."""

    address: str
    token: str
    token_source: str
    home: Home | None = None
    certificate: bytes = b""


class Finder:
    """Finds the cluster of an environment. `may_start`: a cluster is started here where there is none."""

    def __init__(self, say: Say, *, home: Home | None = None, may_start: bool = True) -> None:
        self._say = say
        self._may_start = may_start
        self._remote = home is None and bool(os.environ.get("RACIMO_ADDRESS"))
        self.home = home or Home.default()
        self._endpoint: Endpoint | None = None
        """A cluster elsewhere, whose certificate was fetched and compared once."""

    def never_starting(self) -> "Finder":
        """A finder of the same cluster that starts none."""
        other = copy.copy(self)
        other._may_start = False
        return other

    def find(self) -> Endpoint | None:
        if self._remote:
            self._endpoint = self._endpoint or remote_endpoint(os.environ["RACIMO_ADDRESS"], self.home)
            return self._endpoint
        return local_endpoint(self.home)

    def find_or_start(self) -> Endpoint:
        endpoint = self.find()
        if endpoint is None:
            endpoint = self.restart()
        if endpoint is None:
            raise RacimoError("unreachable", f"no cluster is running here (in {self.home.root})", self.cure())
        return endpoint

    @property
    def head(self) -> str:
        """`IP:PORT` of the control process where it runs on another machine; "" where it is this one's."""
        if self._remote:
            return urlsplit(self._endpoint.address).netloc if self._endpoint is not None else ""
        found = local_endpoint(self.home) if self.home.join_file.exists() else None
        return urlsplit(found.address).netloc if found is not None else ""

    def may_come_back(self, *, patient: bool = False) -> bool:
        """Whether somebody is there to start the control process again. Of a cluster elsewhere nobody here knows."""
        if self._remote:
            return patient
        return any(read_live(self.home.root, role) is not None for role in ("supervisor", "control", "agent"))

    def restart(self) -> Endpoint | None:
        """Starts a cluster here, or None where that is not ours to do."""
        if self._remote or not self._may_start:
            return None
        if self.home.join_file.exists():
            raise RacimoError(
                "unreachable", f"this machine has joined a cluster and its agent is not running ({self.home.root})",
                "racimo up   # starts it again; racimo down leaves the cluster"
            )  # fmt: skip
        from racimo.client.start import up

        self._say(f"no cluster is running here; starting one in {self.home.root} (racimo down ends it)")
        up(self.home, say=self._say)
        return local_endpoint(self.home)

    def cure(self) -> str:
        if self._remote:
            return "check $RACIMO_ADDRESS, or unset it to use the cluster of this machine"
        if self.home.join_file.exists():
            return f"racimo up   # on the head ({self.head}); racimo check here says how this machine stands with it"
        if (self.home.node_dir / "cluster").exists() and not self.home.journal_file.exists():
            return (
                "racimo join ADDRESS --token-file FILE   # this machine has left a cluster; racimo up on its head shows"
                " the line\nracimo up   # begins a cluster of this machine's own"
            )
        return "racimo up"


def connect(home: Home | None = None, *, start: bool = True) -> "Client":
    """A client of the cluster in `home` (default: as `Client()` finds it); `start`: begin one where there is none."""
    from racimo.client.api import Client

    return Client(home=None if home is None else home.root, may_start=start)


def supervisor_alive(home: Home) -> bool:
    return read_live(home.root, "supervisor") is not None


def remote_endpoint(address: str, home: Home) -> Endpoint:
    """A cluster on another machine. An address without a scheme is https where the token has a certificate's pin, and
    without a port a head's default one.

    Raises `invalid-request` for an address that is none, `unauthorized` where there is no token for it, and what
    `fetch_certificate` raises."""
    address = address.strip()
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise RacimoError(
            "invalid-request",
            f"$RACIMO_ADDRESS is an address such as https://10.0.0.1:7700, not {os.environ.get('RACIMO_ADDRESS')!r}",
        )
    token_file = Path(os.environ.get("RACIMO_TOKEN_FILE") or home.token_file)
    token = _read_token(token_file)
    scheme = parts.scheme
    if "://" not in address:
        if not token.pin and not parts.port:
            words = (
                f"the token in {token_file} has no certificate's pin, so the head at {address} cannot be known by it"
            )
            raise RacimoError("unauthorized", words, _TOKEN_HINT)
        scheme = "https" if token.pin else "http"
        address = join_address(*parse_address(parts.netloc)) if not parts.port else address
        parts = urlsplit(f"{scheme}://{address}")
    certificate = b""
    if scheme == "https" and token.pin:
        from racimo.act.tls import fetch_certificate

        certificate = fetch_certificate(join_address(parts.hostname or "", parts.port or 443), token.pin)
    return Endpoint(
        address=f"{scheme}://{address.rpartition('://')[2]}".rstrip("/"),
        token=token.secret,
        token_source=str(token_file),
        certificate=certificate,
    )


def local_endpoint(home: Home) -> Endpoint | None:
    try:
        content = home.cluster_file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RacimoError("unauthorized", f"cannot read {home.cluster_file}: {error.strerror}") from None
    try:
        found = msgspec.json.decode(content, type=ClusterFile)
    except msgspec.MsgspecError:
        return None  # left by a crash in the middle of a write by something that does not write atomically
    token_file = Path(os.environ.get("RACIMO_TOKEN_FILE") or home.token_file)
    try:
        certificate = home.certificate_file.read_bytes() if found.address.startswith("https:") else b""
    except OSError as error:
        raise RacimoError("unauthorized", f"cannot read {home.certificate_file}: {error.strerror}") from None
    return Endpoint(
        address=found.address,
        token=_read_token(token_file).secret,
        token_source=str(token_file),
        home=home,
        certificate=certificate,
    )


def _read_token(path: Path) -> Token:
    try:
        return parse_token(path.read_text())
    except OSError as error:
        raise RacimoError("unauthorized", f"no token: {path}: {error.strerror}", _TOKEN_HINT) from None
