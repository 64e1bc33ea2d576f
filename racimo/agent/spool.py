"""The agent's events on disk until the control process has acknowledged them: numbered, in order, surviving restarts.

Nothing is synced. A killed process loses nothing that it has written; a machine that loses power loses its workers as
well, the next agent finds them dead and says so again, and `take` lets the numbers go on after what control has seen.
"""

import os
from pathlib import Path

import msgspec

from racimo.agent.protocol import AgentEvent, NumberedEvent
from racimo.agent.pulse import Pulse

MAX_PENDING = 100_000
"""No worker is started while this many events wait to be acknowledged."""
REWRITE_BYTES = 1 << 20
"""The file is written anew once it is longer than this and mostly acknowledged."""


class _Mark(msgspec.Struct, frozen=True):
    """First line of a rewritten file, and the line of an acknowledgement: all numbers up to `upto` are done with."""

    upto: int


_NUMBERED = msgspec.json.Decoder(NumberedEvent)
_MARK = msgspec.json.Decoder(_Mark)


class Spool:
    """`append` and `acknowledge` are on disk when they return (see above for what that means)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: dict[int, AgentEvent] = {}
        self._newest = 0
        self.changed = Pulse()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._load()
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size_bytes = os.fstat(self._fd).st_size

    @property
    def newest(self) -> int:
        """Number of the last event ever appended; 0 before the first."""
        return self._newest

    @property
    def full(self) -> bool:
        return len(self._pending) >= MAX_PENDING

    @property
    def pending(self) -> dict[int, AgentEvent]:
        """Events that are not acknowledged, by number, oldest first."""
        return self._pending

    def append(self, event: AgentEvent) -> int:
        """Its number. `OSError` if the disk does not take it; then it has no number and the caller tries again."""
        number = self._newest + 1
        self._write(msgspec.json.encode(NumberedEvent(number, event)))
        self._newest = number
        self._pending[number] = event
        self.changed.beat()
        return number

    def take(self, after: int, limit: int) -> tuple[NumberedEvent, ...]:
        """Acknowledges everything up to `after`, then gives at most `limit` events that follow."""
        if after > self._newest:
            self._renumber(after)
        else:
            self.acknowledge(after)
        return tuple(NumberedEvent(number, event) for number, event in list(self._pending.items())[:limit])

    def acknowledge(self, upto: int) -> None:
        done = [number for number in self._pending if number <= upto]
        if not done:
            return
        for number in done:
            del self._pending[number]
        if self._size_bytes > REWRITE_BYTES:
            self._rewrite()
        else:
            self._write(msgspec.json.encode(_Mark(upto)))

    def close(self) -> None:
        os.close(self._fd)

    def _renumber(self, after: int) -> None:
        """Control has seen numbers that this file has lost (a power cut): what is pending comes after those."""
        events = list(self._pending.values())
        self._pending = {after + 1 + position: event for position, event in enumerate(events)}
        self._newest = after + len(events)
        self._rewrite(after)

    def _write(self, line: bytes) -> None:
        data = line + b"\n"
        written = os.write(self._fd, data)
        if written != len(data):
            os.ftruncate(self._fd, self._size_bytes)
            raise OSError(28, os.strerror(28), os.fspath(self._path))
        self._size_bytes += written

    def _rewrite(self, upto: int | None = None) -> None:
        if upto is None:
            upto = next(iter(self._pending), self._newest + 1) - 1
        temporary = self._path.with_suffix(".new")
        lines = [msgspec.json.encode(_Mark(upto))]
        lines += [msgspec.json.encode(NumberedEvent(number, event)) for number, event in self._pending.items()]
        temporary.write_bytes(b"".join(line + b"\n" for line in lines))
        temporary.chmod(0o600)
        temporary.replace(self._path)
        os.close(self._fd)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size_bytes = os.fstat(self._fd).st_size

    def _load(self) -> None:
        """Reads the file; a torn last line (the agent died in the middle of it) is cut off."""
        if not self._path.exists():
            return
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) != len(content):
            os.truncate(self._path, len(whole))
        for line in whole.splitlines():
            if line.startswith(b'{"upto"'):
                upto = _MARK.decode(line).upto
                self._newest = max(self._newest, upto)
                for number in [number for number in self._pending if number <= upto]:
                    del self._pending[number]
            else:
                numbered = _NUMBERED.decode(line)
                self._newest = max(self._newest, numbered.number)
                self._pending[numbered.number] = numbered.event
