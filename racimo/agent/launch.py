"""What agent and zygote say to each other: framed msgpack on the zygote's own Unix socket."""

from typing import Any, Literal

import msgspec

from racimo.state.nouns import Exit

ZYGOTE_PROTOCOL = 1

EXIT_HELD = 75
"""A zygote that finds another of its name alive ends with this code."""


class _ZygoteMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=True):
    pass


class Launch(_ZygoteMessage, frozen=True, kw_only=True):
    """One worker to fork. `environment` is its whole environment (with secrets: never written to disk)."""

    worker: str
    directory: str
    cwd: str
    environment: dict[str, str]
    kind: Literal["command", "train", "tune"]
    command: tuple[str, ...] = ()
    train_file: str = ""
    train_function: str = ""
    args: tuple[str, ...] = ()
    config: dict[str, Any] = {}
    fresh: bool = False
    shares: int = 1
    threads: int = 1
    seed: int = 0
    rank: int = 0
    host: str = ""
    ballast: str = ""


class Settle(_ZygoteMessage, frozen=True, kw_only=True):
    """Asks which workers of this zygote still run, after everything that came before has been dealt with."""


class Retire(_ZygoteMessage, frozen=True, kw_only=True):
    """Take no more orders; end as soon as no worker is left."""


class Settled(_ZygoteMessage, frozen=True, kw_only=True):
    live: tuple[str, ...]


class ZygoteWelcome(_ZygoteMessage, frozen=True, kw_only=True):
    """The first frame on every connection, sent once everything is imported."""

    pid: int
    protocol: int
    version: str


class Forked(_ZygoteMessage, frozen=True, kw_only=True):
    worker: str
    pid: int
    start_ticks: int


class ForkRefused(_ZygoteMessage, frozen=True, kw_only=True):
    """The zygote is not fit to fork (a second thread, a CUDA context): the agent starts another one."""

    worker: str
    message: str


class Reaped(_ZygoteMessage, frozen=True, kw_only=True):
    """A worker has ended and nothing is left of its processes. `exit` is what is (or could not be) on disk."""

    worker: str
    pid: int
    exit: Exit


ToZygote = Launch | Settle | Retire
FromZygote = ZygoteWelcome | Forked | ForkRefused | Reaped | Settled
