"""What a user asks for: one spec, spelled as flags, as YAML or as Python keywords, field for field."""

import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from racimo.spec.quantity import WorkerRange, parse_duration_s, parse_size_bytes, parse_worker_range
from racimo.spec.study import MAX_PARALLEL, StudySpec

Priority = Literal["low", "normal", "high"]
PRIORITY_ORDER: dict[str, int] = {"high": 0, "normal": 1, "low": 2}

NAME_PATTERN = r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?"
VARIABLE_PATTERN = r"[A-Za-z_][A-Za-z0-9_]*"
EXCERPT_CHARS = 100
MAX_SEED = 2**63 - 1
MAX_THREADS = 1024
MAX_ARGS = 1_000
MAX_ARG_BYTES = 128 * 1024
MAX_SHARES = 64
"""Workers on one device."""
SHARE_TOLERANCE = 0.02
"""So that 0.33 is a third."""
_FRACTION = re.compile(r"0?\.\d{1,6}")


class CheckpointSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and how often a training run saves itself. `to`: a folder (a relative one lies in the run's output folder)
    or fsspec URL; if empty, `checkpoints` in the run's output folder.
    `every`: a duration ("10m") or a count of steps ("200 steps")."""

    to: str = ""
    every: str = "10m"
    keep: int = 2

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"checkpoint.keep is a count from 1 up, not {self.keep}")
        if self.every_steps is None:
            parse_duration_s(self.every)
        elif self.every_steps < 1:
            raise ValueError(f"checkpoint.every counts from 1 step up, not {self.every!r}")

    @property
    def every_steps(self) -> int | None:
        words = self.every.split()
        return int(words[0]) if len(words) == 2 and words[1] in ("step", "steps") and words[0].isdigit() else None

    @property
    def every_s(self) -> float | None:
        return None if self.every_steps is not None else parse_duration_s(self.every)


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One run as asked. Exactly one of `train`, `tune` and `command` is given.

    `train` is a script (`train.py`, run as torchrun would run it) or `train.py:function`, called with `config`. `tune`
    is the same function, called once for each trial of `study`; `workers` and `devices` are then one trial's.
    `devices` is `KIND:COUNT` for the run at its most workers, such as `cpu:4`; left out, each worker gets one device.
    Of a tune run it may be a fraction, `cuda:0.5`: so many trials then share one device.
    `snapshot` is the id of the uploaded files, filled in by the client from `files`.
    `requirements` is the text of the lock file or requirement list that `env` names, filled in by the client.
    """

    name: str = ""
    train: str = ""
    tune: str = ""
    study: StudySpec | None = None
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    config: dict[str, Any] = {}
    workers: str | int = 1
    devices: str = ""
    threads: int = 1
    memory: str = ""
    priority: Priority = "normal"
    files: str = "."
    snapshot: str = ""
    env: str = ""
    requirements: str = ""
    variables: dict[str, str] = {}
    secrets: tuple[str, ...] = ()
    retries: int = 0
    seed: int = 0
    hang_after: str = "60s"
    stop_grace: str = "10s"
    checkpoint: CheckpointSpec = CheckpointSpec()

    def __post_init__(self) -> None:
        if sum(map(bool, (self.train, self.tune, self.command))) != 1:
            raise ValueError("a run is exactly one of train, tune and command")
        if bool(self.tune) != (self.study is not None):
            raise ValueError("tune and study go together: the function, and what is looked for")
        if self.tune and not self.train_function:
            raise ValueError(f"tune is FILE.py:FUNCTION, not {self.tune!r}")
        if self.name and not re.fullmatch(NAME_PATTERN, self.name):
            raise ValueError(f"a name is up to 40 of a-z, 0-9 and inner dashes, not {self.name!r}")
        if not 1 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads are from 1 to {MAX_THREADS}, not {self.threads}")
        if self.retries < 0:
            raise ValueError(f"retries start at 0, not {self.retries}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed is from 0 to {MAX_SEED}, not {self.seed}")
        self._check_text()
        words = (*self.command, *self.args)
        if len(words) > MAX_ARGS or sum(len(word) for word in words) > MAX_ARG_BYTES:
            raise ValueError(f"at most {MAX_ARGS} arguments and {MAX_ARG_BYTES} characters of them")
        worker_range = self.worker_range
        if self.command and worker_range.elastic:
            raise ValueError(f"a command has a fixed count of workers, not {worker_range}")
        if self.tune and worker_range.most > 1:
            raise ValueError(
                f"a trial runs on one worker, not on {worker_range}; study.parallel says how many at a time"
            )
        if self.devices:
            _, count = self.device_demand
            if self.shares > 1 and not self.tune:
                raise ValueError(f"only trials share a device: {self.devices!r} goes with tune")
            if count % worker_range.most:
                raise ValueError(f"{count} devices cannot be shared evenly by {worker_range.most} workers")
        if self.memory:
            parse_size_bytes(self.memory)
        if self.checkpoint.to.startswith("memory://"):
            raise ValueError("checkpoints at memory:// end with the worker that wrote them: give a folder")
        parse_duration_s(self.hang_after)
        parse_duration_s(self.stop_grace)

    def _check_text(self) -> None:
        for name in self.__struct_fields__:
            for text in _texts(getattr(self, name)):
                try:
                    text.isascii() or text.encode()
                except UnicodeEncodeError:
                    raise ValueError(f"{name} holds {_excerpt(text)}, which is not UTF-8 text") from None
        if any("\0" in word for word in (*self.command, *self.args)):
            raise ValueError("arguments cannot hold a NUL character")
        for name, value in self.variables.items():
            if not re.fullmatch(VARIABLE_PATTERN, name):
                raise ValueError(f"variables are named with letters, digits and _, not {_excerpt(name)}")
            if "\0" in value:
                raise ValueError(f"variables cannot hold a NUL character, as {name} does")

    @property
    def kind(self) -> Literal["train", "tune", "command"]:
        return "train" if self.train else "tune" if self.tune else "command"

    @property
    def worker_range(self) -> WorkerRange:
        return parse_worker_range(self.workers)

    @property
    def size_range(self) -> WorkerRange:
        """How many workers the run as a whole may have: of a tune run as many as there may be trials at a time."""
        if self.study is None:
            return self.worker_range
        return WorkerRange(1, min(self.study.parallel or MAX_PARALLEL, self.study.trials))

    @property
    def device_demand(self) -> tuple[str, int]:
        """(kind, count) at the most workers; the kind is "" where any will do."""
        if not self.devices:
            return "", self.worker_range.most
        kind, _, count = self.devices.partition(":")
        if kind and _FRACTION.fullmatch(count) and self.shares > 1:
            return kind.lower(), 1
        if not kind or not (count or "1").isdigit() or int(count or "1") < 1:
            raise ValueError(f"devices are KIND:COUNT such as cpu:4, not {self.devices!r}")
        return kind.lower(), int(count or "1")

    @property
    def shares(self) -> int:
        """How many workers share one device: 1, or 1 / F where `devices` is KIND:F with a fraction F.

        `ValueError` for a fraction that does not divide a device, such as 0.4."""
        fraction = self.devices.partition(":")[2]
        if not _FRACTION.fullmatch(fraction) or not float(fraction):
            return 1
        shares = round(1 / float(fraction))
        if shares > MAX_SHARES or abs(shares * float(fraction) - 1) > SHARE_TOLERANCE:
            raise ValueError(
                f"a device is shared by 2 to {MAX_SHARES} trials alike (0.5, 0.33, 0.25), not as {fraction}"
            )
        return shares

    @property
    def devices_per_worker(self) -> int:
        return self.device_demand[1] // self.worker_range.most

    @property
    def memory_bytes(self) -> int | None:
        return parse_size_bytes(self.memory) if self.memory else None

    @property
    def _code(self) -> str:
        return self.train or self.tune

    @property
    def train_file(self) -> str:
        """The file of the function or script; "" for a command."""
        return self._code.rpartition(":")[0] if self.train_function else self._code

    @property
    def train_function(self) -> str:
        """The function's name in `FILE:FUNCTION`, or "" for a script."""
        head, _, tail = self._code.rpartition(":")
        return tail if head and tail.isidentifier() else ""


def _texts(value: Any) -> Iterator[str]:
    """Every text in a field, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, CheckpointSpec):
        yield value.to


def _excerpt(text: str) -> str:
    return ascii(text if len(text) <= EXCERPT_CHARS else text[:EXCERPT_CHARS] + "...")
