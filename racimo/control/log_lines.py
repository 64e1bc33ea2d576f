"""Bytes of a log as whole lines, each with the offset behind it: from there another reader goes on."""

from typing import Literal

from racimo.spec.errors import RacimoError

MAX_LINE_BYTES = 1_000_000
"""A longer line is cut there and goes on as another."""

Stream = Literal["out", "err"]
STREAMS: tuple[Stream, Stream] = ("out", "err")


class LineSplitter:
    """Bytes in, whole lines out (without their end); `rest` is the unfinished one, which begins at `at`."""

    def __init__(self, at: int = 0) -> None:
        self.rest = b""
        self.at = at

    def jump(self, at: int) -> None:
        """What comes next begins at `at`; an unfinished line is given up."""
        self.rest, self.at = b"", at

    def feed(self, content: bytes) -> list[tuple[int, bytes]]:
        """(offset behind it, line) for each line that is complete now."""
        *lines, self.rest = (self.rest + content).split(b"\n")
        cut: list[tuple[int, bytes]] = []
        for line in lines:
            pieces = [line[at : at + MAX_LINE_BYTES] for at in range(0, len(line), MAX_LINE_BYTES)] or [b""]
            for number, piece in enumerate(pieces, 1):
                self.at += len(piece) + (number == len(pieces))
                cut.append((self.at, piece))
        while len(self.rest) >= MAX_LINE_BYTES:
            self.at += MAX_LINE_BYTES
            cut.append((self.at, self.rest[:MAX_LINE_BYTES]))
            self.rest = self.rest[MAX_LINE_BYTES:]
        return cut


def start_of_tail(content: bytes, num_lines: int) -> int | None:
    """Where the last `num_lines` lines of `content` begin; None if it holds fewer whole ones."""
    end = len(content) - 1 if content.endswith(b"\n") else len(content)
    for _ in range(num_lines):
        end = content.rfind(b"\n", 0, end)
        if end < 0:
            return None
    return min(end + 1, len(content))


Positions = dict[tuple[int, int], tuple[int, int]]
"""By (attempt, index) of a worker: up to where its `out` and `err` were read."""


def parse_positions(text: str) -> Positions:
    """From `ATTEMPT/INDEX:OUT:ERR;...`, as a client that comes back says it. `RacimoError` invalid-request."""
    positions: Positions = {}
    try:
        for word in filter(None, text.split(";")):
            worker, out, err = word.split(":")
            attempt, index = worker.split("/")
            positions[int(attempt), int(index)] = (max(int(out), 0), max(int(err), 0))
    except ValueError:
        raise RacimoError(
            "invalid-request", f"`from` is ATTEMPT/INDEX:OUT:ERR;..., not {text[:100]!r}", "see /docs"
        ) from None
    return positions
