"""Streams that go on after the control process was killed and came back: no line twice, none left out.

Each log line says how far into its worker's stream it goes. After reconnecting the client asks for what follows, and
drops what it is given again all the same.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from racimo.client.session import Backoff, Disconnected, Params, Session, split_lines
from racimo.control.views import LogLine, RunProgress, RunView
from racimo.spec.errors import RacimoError
from racimo.state.events import Record
from racimo.state.nouns import ENDED

MAX_FROM_CHARS = 32_000
"""Of an address; streams of workers that find no place there are read again from their beginning."""
MAX_NOTICES = 1_000

T = TypeVar("T")


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

    def __init__(self) -> None:
        self._offsets: dict[str, dict[str, int]] = {}
        self._notices: dict[tuple[str, str], None] = {}

    def is_new(self, line: LogLine) -> bool:
        """Also takes note of it. A line without an offset is a word of ours, said once."""
        if not line.offset:
            known = (line.worker, line.text) in self._notices
            self._notices[line.worker, line.text] = None
            if len(self._notices) > MAX_NOTICES:
                del self._notices[next(iter(self._notices))]
            return not known
        seen = self._offsets.setdefault(line.worker, {})
        if line.offset <= seen.get(line.stream, 0):
            return False
        seen[line.stream] = line.offset
        return True

    def go_on(self, params: Params) -> Params:
        """The query with which a stream goes on. Whoever was not heard yet is read from the beginning, as there was
        nothing of them to be seen; unless none was to be seen (`tail=0`)."""
        if not self._offsets:
            return params
        kept = {key: value for key, value in params.items() if key != "tail" or not value}
        words: list[str] = []
        num_chars = 0
        for worker, seen in reversed(self._offsets.items()):
            word = f"{worker.partition('/')[2]}:{seen.get('out', 0)}:{seen.get('err', 0)}"
            num_chars += len(word) + 1
            if num_chars > MAX_FROM_CHARS:
                break
            words.append(word)
        return {**kept, "from": ";".join(words)}


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
    position = LogPosition()
    asked = dict(params)
    for line in follow_json(session, path, params, lambda: wait_view().status in ENDED):
        if not line:
            params.clear()
            params.update(position.go_on(asked))
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
