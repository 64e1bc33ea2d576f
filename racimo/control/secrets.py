"""Secrets: values that reach workers as environment variables and nothing else. One 0600 file, never the journal."""

import re
from pathlib import Path

import msgspec

from racimo.control.private_files import write_private
from racimo.spec.errors import RacimoError

MAX_SECRETS = 1_000
MAX_SECRET_BYTES = 64 * 1024
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


class SecretStore:
    """The secrets of a cluster, by name. Small, so the whole file is read at start and written at each change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._values = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            self._values = {}
        except msgspec.MsgspecError as error:
            raise RacimoError("start-failed", f"{path} is not readable: {error}", f"mv {path} {path}.bad") from error

    def names(self) -> list[str]:
        return sorted(self._values)

    def put(self, name: str, value: str) -> None:
        """`RacimoError` invalid-request for a name that cannot be a variable or a value that cannot be one's."""
        if not NAME.fullmatch(name):
            raise RacimoError("invalid-request", f"a secret's name is that of a variable (A-Z, 0-9, _), not {name!r}")
        if not value or "\0" in value or len(value.encode()) > MAX_SECRET_BYTES:
            raise RacimoError(
                "invalid-request", f"a secret's value has 1 to {MAX_SECRET_BYTES} bytes, none of them NUL"
            )
        if name not in self._values and len(self._values) >= MAX_SECRETS:
            raise RacimoError("invalid-request", f"there are {MAX_SECRETS} secrets already", "racimo secret rm NAME")
        self._write({**self._values, name: value})

    def remove(self, name: str) -> None:
        if name not in self._values:
            raise RacimoError("not-found", f"there is no secret {name!r}", "racimo secret list")
        self._write({other: value for other, value in self._values.items() if other != name})

    def require(self, names: tuple[str, ...]) -> None:
        """`RacimoError` secret-missing, naming all that are not there."""
        missing = [name for name in names if name not in self._values]
        if missing:
            raise RacimoError(
                "secret-missing", f"no secret named {', '.join(missing)}", f"racimo secret set {missing[0]}"
            )

    def values(self, names: tuple[str, ...]) -> dict[str, str]:
        """Those of `names` that exist now."""
        return {name: self._values[name] for name in names if name in self._values}

    def _write(self, values: dict[str, str]) -> None:
        write_private(self._path, msgspec.json.encode(values))
        self._values = values
