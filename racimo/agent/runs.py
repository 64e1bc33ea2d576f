"""What the agent keeps per run: its newest generation, and what its workers reported (first wins per trial, step and
name)."""

import errno
import math
import os
import sys
from pathlib import Path

import msgspec

from racimo.agent.protocol import Announce, Report, ReportBatch
from racimo.agent.pulse import Pulse
from racimo.agent.whole_file import write_whole
from racimo.spec.home import Home

MAX_REPORT_LINES = 100_000
STEP_TAIL_BYTES = 8 * 1024
MAX_OPEN_RUNS = 64
"""Runs whose reports are held in memory; others are read again from their file."""


class _StepLine(msgspec.Struct, frozen=True):
    """What is needed here of a line of `steps.jsonl`."""

    step: int


_STEP_LINE = msgspec.json.Decoder(_StepLine)


def newest_commit(workers_dir: Path) -> int:
    """The newest step that any worker of a run wrote to its `steps.jsonl` below `ATTEMPT/INDEX/`; 0 before the first.

    A worker tells its progress a few times a second, and none while the agent is away; the files have every commit.
    """
    newest = 0
    for path in workers_dir.glob("*/*/steps.jsonl"):
        with open(path, "rb") as file:
            file.seek(max(path.stat().st_size - STEP_TAIL_BYTES, 0))
            lines = file.read().split(b"\n")
        for line in reversed(lines[:-1]):  # without what a kill cut off
            try:
                newest = max(newest, _STEP_LINE.decode(line).step)
            except msgspec.DecodeError:
                continue  # the first line of the tail may be half a line
            break
    return newest


def newest_run_number(home: Home) -> int:
    """The highest number among the names (`NAME-NUMBER`) of runs that left workers or outputs here; 0 if none."""
    names = [path.name for folder in (home.node_dir / "workers", home.output_dir("")) for path in folder.glob("*-*")]
    numbers = [name.rpartition("-")[2] for name in names]
    return max((int(number) for number in numbers if number.isascii() and number.isdigit()), default=0)


_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""How what JSON has no number for is written."""


class _ReportLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A report in its file."""

    step: int
    values: dict[str, float | str | None]
    """None: a value that is not finite, from before there were words for it."""
    trial: int | None = None


_REPORT_LINE = msgspec.json.Decoder(_ReportLine)


def encode_report(report: Report) -> bytes:
    """One line of a file of reports."""
    values: dict[str, float | str | None] = {
        name: value if math.isfinite(value) else str(value) for name, value in report.values.items()
    }
    return msgspec.json.encode(_ReportLine(step=report.step, values=values, trial=report.trial)) + b"\n"


def decode_report(line: bytes) -> Report:
    """`msgspec.DecodeError` for a line that a kill or a full disk has torn."""
    read = _REPORT_LINE.decode(line)
    values = {
        name: _WORDS.get(value, math.nan) if isinstance(value, str) else math.nan if value is None else value
        for name, value in read.values.items()
    }
    return Report(step=read.step, values=values, trial=read.trial)


class Seen:
    """Which (trial, step, name) was reported: the first value of each counts."""

    def __init__(self) -> None:
        self._keys: set[tuple[int | None, int, str]] = set()

    def copy(self) -> "Seen":
        """Another one that has seen the same so far."""
        other = Seen()
        other._keys = set(self._keys)
        return other

    def fresh(self, report: Report) -> Report | None:
        """What of a report is new; None if nothing is."""
        values = {
            name: value for name, value in report.values.items() if (report.trial, report.step, name) not in self._keys
        }
        return Report(step=report.step, values=values, trial=report.trial) if values else None

    def note(self, report: Report) -> None:
        """From now on it is not new."""
        self._keys.update((report.trial, report.step, name) for name in report.values)


class _Reports:
    """One run's reports: the file, and which of each trial, step and name it holds."""

    def __init__(self, path: Path) -> None:
        self.lines: list[Report] = []
        self._seen = Seen()
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - until `close`
        self._file.seek(0)
        content = self._file.read()
        if content and not content.endswith(b"\n"):
            self._file.truncate(content.rfind(b"\n") + 1)  # a line torn by a kill in the middle of the write
        self._file.seek(0, os.SEEK_END)
        for line in content.splitlines():
            try:
                report = self._seen.fresh(decode_report(line))
            except msgspec.DecodeError:
                continue  # the torn one
            if report is not None:
                self._keep(report)

    def add(self, report: Report) -> None:
        """Keeps what nobody reported before. Beyond the bound, nothing. `OSError` if the disk does not take it."""
        fresh = self._seen.fresh(report) if len(self.lines) < MAX_REPORT_LINES else None
        if fresh is None:
            return
        line = encode_report(fresh)
        size_bytes = self._file.tell()
        if self._file.write(line) != len(line):
            self._file.truncate(size_bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        self._keep(fresh)

    def _keep(self, report: Report) -> None:
        self.lines.append(report)
        self._seen.note(report)

    def close(self) -> None:
        self._file.close()


class Runs:
    """Generations and reports by run id, in `node/runs/RUN/`."""

    def __init__(self, home: Home) -> None:
        self._root = home.node_dir / "runs"
        self._announced: dict[str, Announce] = {}
        self._reports: dict[str, _Reports] = {}
        self.reported: set[str] = set()
        """Runs of which something was reported since somebody has emptied this."""
        self.news = Pulse()
        """Beats when the first run comes into `reported`."""

    def announce(self, message: Announce) -> bool:
        """Keeps a generation, or the same with other addresses; False if a newer one (or just this) is known."""
        known = self.generation(message.run)
        if known is not None and (known.attempt, known.number) > (message.attempt, message.number):
            return False
        if known == message:
            return False
        self._announced[message.run] = message
        path = self._folder(message.run) / "generation.json"
        write_whole(path, msgspec.json.encode(message))
        return True

    def generation(self, run: str) -> Announce | None:
        """The newest generation that control announced, also to an earlier agent."""
        if run not in self._announced:
            try:
                content = (self._root / run / "generation.json").read_bytes()
            except FileNotFoundError:
                return None
            self._announced[run] = msgspec.json.decode(content, type=Announce)
        return self._announced[run]

    def report(self, run: str, report: Report) -> None:
        try:
            self._reports_of(run).add(report)
        except OSError as error:
            print(f"agent: lost a report of {run}: {error}", file=sys.stderr)
        first = not self.reported
        self.reported.add(run)
        if first:
            self.news.beat()

    def read_reports(self, run: str, after: int, limit: int) -> ReportBatch:
        lines = self._reports_of(run).lines if run in self._reports or (self._root / run).exists() else []
        chosen = tuple(lines[after : after + limit])
        return ReportBatch(next=after + len(chosen), reports=chosen)

    def forget(self, run: str) -> None:
        self._announced.pop(run, None)
        self._close(run)
        self.reported.discard(run)

    def close(self) -> None:
        """Lets go of the files."""
        for run in list(self._reports):
            self._close(run)

    def _reports_of(self, run: str) -> _Reports:
        if run not in self._reports:
            if len(self._reports) >= MAX_OPEN_RUNS:
                self._close(next(iter(self._reports)))
            self._reports[run] = _Reports(self._folder(run) / "reports.jsonl")
        return self._reports[run]

    def _close(self, run: str) -> None:
        reports = self._reports.pop(run, None)
        if reports is not None:
            reports.close()

    def _folder(self, run: str) -> Path:
        folder = self._root / run
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder
