"""Every error that Racimo itself raises: one cause, what was asked against what was found, and what to type next.

The codes are stable, and each has its section in `docs/errors.md`; a test holds this table and that page together.
"""

from enum import IntEnum

import msgspec


class ExitCode(IntEnum):
    """Exit codes of the `racimo` command."""

    OK = 0
    RUN_FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    NEVER_FITS = 4
    INTERRUPTED = 130


class ErrorKind(msgspec.Struct, frozen=True):
    """How one code shows: the command's exit code and the HTTP status of the API."""

    exit_code: ExitCode
    http_status: int


_U, _F, _N, _X = ExitCode.USAGE, ExitCode.RUN_FAILED, ExitCode.NEVER_FITS, ExitCode.UNREACHABLE

ERROR_KINDS: dict[str, ErrorKind] = {
    # Asked for something that cannot be.
    "invalid-spec": ErrorKind(_U, 422),
    "invalid-request": ErrorKind(_U, 400),
    "file-missing": ErrorKind(_U, 422),
    "file-unreadable": ErrorKind(_U, 422),
    "syntax-error": ErrorKind(_U, 422),
    "function-missing": ErrorKind(_U, 422),
    "upload-too-large": ErrorKind(_U, 413),
    "can-never-fit": ErrorKind(_N, 422),
    "secret-missing": ErrorKind(_U, 422),
    "extra-missing": ErrorKind(_U, 501),
    "output-missing": ErrorKind(_U, 404),
    "run-unknown": ErrorKind(_U, 404),
    "node-unknown": ErrorKind(_U, 404),
    "not-found": ErrorKind(_U, 404),
    "wrong-state": ErrorKind(_U, 409),
    "queue-full": ErrorKind(_F, 429),
    "busy": ErrorKind(_F, 429),
    # Between client and cluster.
    "unauthorized": ErrorKind(_X, 401),
    "version-mismatch": ErrorKind(_X, 426),
    "unreachable": ErrorKind(_X, 503),
    "start-failed": ErrorKind(_X, 503),
    "join-refused": ErrorKind(_X, 409),
    "clock-off": ErrorKind(_X, 409),
    "certificate-mismatch": ErrorKind(_X, 495),
    "ssh-failed": ErrorKind(_X, 502),
    "home-on-network-filesystem": ErrorKind(_X, 500),
    "home-not-private": ErrorKind(_X, 500),
    "journal-unreadable": ErrorKind(_X, 500),
    "disk-full": ErrorKind(_F, 507),
    "internal": ErrorKind(_F, 500),
    # What ended a run or one of its workers.
    "environment-failed": ErrorKind(_F, 500),
    "module-missing": ErrorKind(_F, 500),
    "worker-raised": ErrorKind(_F, 500),
    "worker-exited": ErrorKind(_F, 500),
    "worker-killed": ErrorKind(_F, 500),
    "worker-left-early": ErrorKind(_F, 500),
    "worker-hung": ErrorKind(_F, 500),
    "worker-lost": ErrorKind(_F, 500),
    "node-lost": ErrorKind(_F, 500),
    "node-drained": ErrorKind(_F, 500),
    "pair-unreachable": ErrorKind(_F, 500),
    "rendezvous-failed": ErrorKind(_F, 500),
    "out-of-memory": ErrorKind(_F, 500),
    "crash-loop": ErrorKind(_F, 500),
    # Tuning.
    "space-changed": ErrorKind(_U, 409),
    "metric-invalid": ErrorKind(_F, 500),
    "metric-missing": ErrorKind(_F, 500),
    "metric-late": ErrorKind(_F, 500),
    "proposer-failed": ErrorKind(_F, 500),
    "prepaid-over": ErrorKind(_F, 500),
    # Training.
    "dataset-too-small": ErrorKind(_F, 500),
    "too-many-workers": ErrorKind(_U, 422),
    "not-exact": ErrorKind(_F, 500),
    "own-collectives": ErrorKind(_F, 500),
    "state-not-stateful": ErrorKind(_F, 500),
    "steps-misused": ErrorKind(_F, 500),
    "workers-diverged": ErrorKind(_F, 500),
    "numerics-class": ErrorKind(_F, 500),
    "checkpoint-torn": ErrorKind(_F, 500),
    "checkpoint-mismatch": ErrorKind(_F, 500),
    "checkpoint-failed": ErrorKind(_F, 500),
}


class RacimoError(Exception):
    """An error for people: `code` from `ERROR_KINDS`, `message` with the numbers, `hint` that works when pasted."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(_encodable(message))
        assert code in ERROR_KINDS, code
        self.code = code
        self.message = _encodable(message)
        self.hint = _encodable(hint)

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]" + (f"\n  {self.hint}" if self.hint else "")

    @property
    def kind(self) -> ErrorKind:
        return ERROR_KINDS[self.code]


def _encodable(text: str) -> str:
    """What UTF-8 cannot hold (a file name's odd byte) as an escape, so that an error can always be sent and shown."""
    return text.encode(errors="backslashreplace").decode()
