"""Where the cluster is: `$RACIMO_ADDRESS`, else the one whose home this machine has, else a new one started here."""

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from racimo.act.guardian import read_live
from racimo.client.say import Say
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

if TYPE_CHECKING:
    from racimo.client.api import Client


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An address and the token for it. `home` is None where the cluster belongs to another machine or user."""

    address: str
    token: str
    token_source: str
    home: Home | None = None


class ClusterFile(msgspec.Struct, frozen=True):
    """`cluster.json`, as the control process writes it."""

    id: str
    address: str
    version: str


class Finder:
    """Finds the cluster of an environment. `may_start`: a cluster is started here where there is none."""

    def __init__(self, say: Say, *, home: Home | None = None, may_start: bool = True) -> None:
        self._say = say
        self._may_start = may_start
        self._remote = home is None and bool(os.environ.get("RACIMO_ADDRESS"))
        self.home = home or Home.default()

    def never_starting(self) -> "Finder":
        """A finder of the same cluster that starts none."""
        other = copy.copy(self)
        other._may_start = False
        return other

    def find(self) -> Endpoint | None:
        if self._remote:
            return remote_endpoint(os.environ["RACIMO_ADDRESS"], self.home)
        return local_endpoint(self.home)

    def find_or_start(self) -> Endpoint:
        endpoint = self.find()
        if endpoint is None:
            endpoint = self.restart()
        if endpoint is None:
            raise RacimoError("unreachable", f"no cluster is running here (in {self.home.root})", self.cure())
        return endpoint

    def may_come_back(self, *, patient: bool = False) -> bool:
        """Whether somebody is there to start the control process again. Of a cluster elsewhere nobody here knows."""
        if self._remote:
            return patient
        return any(read_live(self.home.root, role) is not None for role in ("supervisor", "control", "agent"))

    def restart(self) -> Endpoint | None:
        """Starts a cluster here, or None where that is not ours to do."""
        if self._remote or not self._may_start:
            return None
        from racimo.client.start import up

        self._say(f"no cluster is running here; starting one in {self.home.root} (racimo down ends it)")
        up(self.home, say=self._say)
        return local_endpoint(self.home)

    def cure(self) -> str:
        if self._remote:
            return "check $RACIMO_ADDRESS, or unset it to use the cluster of this machine"
        return "racimo up"


def connect(home: Home | None = None, *, start: bool = True) -> "Client":
    """A client of the cluster in `home` (default: as `Client()` finds it); `start`: begin one where there is none."""
    from racimo.client.api import Client

    return Client(home=None if home is None else home.root, may_start=start)


def supervisor_alive(home: Home) -> bool:
    return read_live(home.root, "supervisor") is not None


def remote_endpoint(address: str, home: Home) -> Endpoint:
    """Raises `invalid-request` for an address that is none and `unauthorized` where there is no token for it."""
    address = address.strip()
    if "://" not in address:
        address = f"http://{address}"
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RacimoError(
            "invalid-request",
            f"$RACIMO_ADDRESS is an address such as http://127.0.0.1:7400, not {os.environ.get('RACIMO_ADDRESS')!r}",
        )
    token_file = Path(os.environ.get("RACIMO_TOKEN_FILE") or home.token_file)
    return Endpoint(address=address.rstrip("/"), token=_read_token(token_file), token_source=str(token_file))


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
    return Endpoint(address=found.address, token=_read_token(token_file), token_source=str(token_file), home=home)


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        hint = "export RACIMO_TOKEN_FILE=FILE with the token that `racimo up` made (the file `token` in its home)"
        raise RacimoError("unauthorized", f"no token: {path}: {error.strerror}", hint) from None
