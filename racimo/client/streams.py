"""Streams that go on after the control process was killed and came back: no line twice, none left out.

Log lines carry no number, so the client counts them per worker and stream and skips as many after reconnecting. Where
only the last lines were asked for (`tail`) the counts are not known; then the whole log is read once without following
and the newest lines seen are looked up in it.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from racimo.client.session import Backoff, Disconnected, Params, Session, split_lines
from racimo.control.views import LogLine, RunProgress, RunView
from racimo.spec.errors import RacimoError
from racimo.state.events import Record
from racimo.state.nouns import ENDED

REMEMBERED_LINES = 50
"""Newest lines per worker and stream by which a tailed log is found again."""

T = TypeVar("T")
Source = tuple[str, str]


def follow_json(session: Session, path: str, params: Params, is_over: Callable[[], bool] | None) -> Iterator[bytes]:
    """NDJSON lines of one GET; connects again when cut, as long as `is_over` (asked after an end) says no.

    After each reconnection an empty line is yielded, so that the caller can skip what it has seen."""
    waits_for = "the control process, to go on with the stream"
    backoff = Backoff(session.say, waits_for)
    while True:
        try:
            with session.open_stream("GET", path, params=params) as answer:
                for line in split_lines(answer.iter_bytes()):
                    backoff = Backoff(session.say, waits_for)
                    yield line
            if is_over is None or is_over():
                return
        except Disconnected as error:
            session.recover(backoff, error, patient=True, following=is_over is not None)
        else:
            if not backoff.wait():
                raise session.unreachable("the stream ends again and again although the run has not ended")
        yield b""


class LogPosition:
    """How far a reader is in each worker's streams."""

    def __init__(self, *, tailed: bool) -> None:
        self.tailed = tailed
        self.seen: Counter[Source] = Counter()
        self.to_skip: Counter[Source] = Counter()
        self._newest: dict[Source, deque[str]] = {}

    def is_new(self, line: LogLine) -> bool:
        source = (line.worker, line.stream)
        if self.to_skip[source] > 0:
            self.to_skip[source] -= 1
            return False
        self.seen[source] += 1
        self._newest.setdefault(source, deque(maxlen=REMEMBERED_LINES)).append(line.text)
        return True

    def rewind(self, whole_log: Callable[[], Iterable[LogLine]]) -> None:
        """The stream begins anew with the whole log: skip what was seen."""
        if self.tailed:
            self._count_by_content(whole_log())
            self.tailed = False
        self.to_skip = Counter(self.seen)

    def _count_by_content(self, lines: Iterable[LogLine]) -> None:
        texts: dict[Source, list[str]] = {}
        for line in lines:
            texts.setdefault((line.worker, line.stream), []).append(line.text)
        for source, found in texts.items():
            # Of a source that has shown no line yet, what stands there counts as older than the tail.
            newest = self._newest.get(source)
            self.seen[source] = position_after(found, list(newest)) if newest else len(found)


def position_after(texts: list[str], newest: list[str]) -> int:
    """How many of `texts` have been seen if the last seen were `newest`: behind their last occurrence."""
    if not newest:
        return 0
    for end in range(len(texts), 0, -1):
        size = min(end, len(newest))
        if texts[end - size : end] == newest[-size:]:
            return end
    return 0


def logs(
    session: Session, run: str, *, follow: bool, worker: str, tail: int | None, wait_view: Callable[[], RunView]
) -> Iterator[LogLine]:
    path = f"/v1/runs/{run}/logs"
    params: Params = {"follow": int(follow)}
    if worker:
        params["worker"] = worker
    if tail is not None:
        params["tail"] = tail
    decode = msgspec.json.Decoder(LogLine).decode
    if not follow:
        yield from (decode(line) for line in follow_json(session, path, params, None) if line)
        return
    position = LogPosition(tailed=tail is not None)
    whole: Params = {key: value for key, value in params.items() if key != "tail"}

    def whole_log() -> Iterator[LogLine]:
        snapshot: Params = {**whole, "follow": 0}
        return (decode(line) for line in follow_json(session, path, snapshot, None) if line)

    for line in follow_json(session, path, params, lambda: wait_view().status in ENDED):
        if not line:
            position.rewind(whole_log)
            params.pop("tail", None)
            continue
        log_line = decode(line)
        if position.is_new(log_line):
            yield log_line


def events(session: Session, run: str, *, follow: bool) -> Iterator[Record]:
    """Journal records of a run in order, each once. The API's last line, `{"ended": ...}`, ends the iterator."""
    decoder = msgspec.json.Decoder(Record)
    last_seq = -1
    over = False
    lines = follow_json(session, f"/v1/runs/{run}/events", {"follow": int(follow)}, (lambda: over) if follow else None)
    for line in lines:
        if not line:
            continue
        if line.startswith(b'{"ended"'):
            over = True
            continue
        record = decoder.decode(line)
        if record.seq > last_seq:
            last_seq = record.seq
            yield record


def progress(session: Session, run: str, *, follow: bool) -> Iterator[RunProgress]:
    decoder = msgspec.json.Decoder(RunProgress)
    newest: RunProgress | None = None
    path = f"/v1/runs/{run}/progress"
    is_over = (lambda: newest is not None and newest.status in ENDED) if follow else None
    for line in follow_json(session, path, {"follow": int(follow)}, is_over):
        if line:
            newest = decoder.decode(line)
            yield newest


def once(session: Session, method: str, path: str, body: object) -> Iterator[bytes]:
    """A stream that cannot be taken up again (`exec`)."""
    try:
        with session.open_stream(method, path, body=body) as answer:
            yield from split_lines(answer.iter_bytes())
    except Disconnected as error:
        raise RacimoError("unreachable", f"lost the connection during {method} {path}: {error}") from None
