"""Following a run until it ends: its output, why it waits, what happens to it, and a live line for training.

Ctrl-C ends the following, never the run.
"""

import sys
import threading
import time
from collections.abc import Callable

from racimo.cli.console import is_terminal, talk, width, write_json
from racimo.cli.render import come_back, ended_words, event_line, failure_lines, log_text, progress_words
from racimo.client.api import Client
from racimo.control.views import LogLine, RunProgress, RunView
from racimo.spec.errors import ExitCode, RacimoError
from racimo.state import events
from racimo.state.nouns import ENDED, Reason

FIRST_LOOK_S = 0.5
"""A run that has not started by then gets its reason shown."""
LOOK_AGAIN_S = 2.0
PROGRESS_LINE_S = 15.0
"""Between progress lines where there is no terminal."""
JOIN_S = 1.0

TOLD_EVENTS = (
    events.GenerationAnnounced,
    events.RunRequeued,
    events.RunPaused,
    events.WorkersPlanned,
    events.PauseRequested,
    events.StopRequested,
    events.ResumeRequested,
)
"""What somebody who follows a training run wants to be told as it happens."""


Watcher = Callable[[Client, RunView, "Screen", threading.Event], None]


class Screen:
    """Where several threads write: whole lines, and one live line at the bottom of a terminal."""

    def __init__(self, *, quiet: bool, logs_to_stderr: bool) -> None:
        self._lock = threading.Lock()
        self._quiet = quiet
        self._logs_to_stderr = logs_to_stderr
        self._live = is_terminal(sys.stderr) and not quiet
        self._status = ""
        self._told_s = 0.0
        self._closed = False

    def log(self, line: LogLine, *, with_worker: bool) -> None:
        stream = sys.stderr if line.stream == "err" or self._logs_to_stderr else sys.stdout
        with self._lock:
            self._erase()
            print(log_text(line, with_worker=with_worker), file=stream, flush=True)
            self._draw()

    def tell(self, text: str) -> None:
        with self._lock:
            if not self._quiet and not self._closed:
                self._erase()
                talk(text)
                self._draw()

    def status(self, text: str) -> None:
        """The live line; off a terminal a plain one now and then."""
        with self._lock:
            if self._quiet or self._closed:
                return
            if self._live:
                self._erase()
                self._status = text
                self._draw()
            elif time.monotonic() - self._told_s >= PROGRESS_LINE_S:
                self._told_s = time.monotonic()
                talk(text)

    def close(self) -> None:
        with self._lock:
            self._erase()
            self._status = ""
            self._closed = True

    def _erase(self) -> None:
        if self._live and self._status:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _draw(self) -> None:
        if self._live and self._status:
            print(self._status[: width(sys.stderr) - 1], end="", file=sys.stderr, flush=True)


def follow(client: Client, view: RunView, *, as_json: bool = False, quiet: bool = False) -> int:
    """Shows a submitted run until it ends; the command's exit code."""
    screen = Screen(quiet=quiet, logs_to_stderr=as_json)
    over = threading.Event()
    screen.tell(f"{view.id} submitted")
    threads = [_start(_watch_queue, client.beside(), view, screen, over)]
    if view.kind == "train":
        threads.append(_start(_watch_progress, client.beside(), view, screen, over))
        threads.append(_start(_watch_events, client.beside(), view, screen, over))
    try:
        for line in client.logs(view.id, follow=True):
            screen.log(line, with_worker=view.most > 1)
        final = client.run(view.id)
        if final.status not in ENDED:
            final = client.wait(view.id)
    except KeyboardInterrupt:
        screen.close()
        print(f"\n{come_back(view.id)}", file=sys.stderr)
        return ExitCode.INTERRUPTED
    finally:
        over.set()
        screen.close()
    deadline_s = time.monotonic() + JOIN_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return finish(final, as_json=as_json, quiet=quiet)


def finish(view: RunView, *, as_json: bool, quiet: bool) -> int:
    """Says how the run ended; the exit code."""
    if as_json:
        write_json(view)
    if view.status == "succeeded":
        if view.kind == "train" and not quiet:
            talk(f"{view.id} {'  '.join(ended_words(view))}; outputs: racimo get {view.id}")
        return ExitCode.OK
    if view.failure is not None:
        print("\n".join(failure_lines(view.failure)), file=sys.stderr)
    told = view.failure is not None and view.reason is not None and view.reason.text.startswith(view.failure.message)
    reason = f": {view.reason.text}" if view.reason is not None and not told else ""
    talk(f"{view.id} {view.status}{reason}")
    return ExitCode.RUN_FAILED


def _start(target: Watcher, client: Client, view: RunView, screen: Screen, over: threading.Event) -> threading.Thread:
    def run() -> None:
        try:
            target(client, view, screen, over)
        except RacimoError as error:
            if not over.is_set():
                screen.tell(f"{target.__name__.strip('_').replace('_', ' ')}: {error.message}")
        finally:
            client.close()

    thread = threading.Thread(target=run, daemon=True, name=target.__name__)
    thread.start()
    return thread


def _watch_queue(client: Client, view: RunView, screen: Screen, over: threading.Event) -> None:
    """Says why the run waits, whenever that changes, until it has started."""
    said = ""
    pause_s = FIRST_LOOK_S
    while not over.wait(pause_s):
        now = client.run(view.id)
        if now.status != "queued":
            return
        text = now.reason.text if now.reason is not None else "not planned yet"
        if text != said:
            said = text
            screen.tell(f"{view.id} waits: {text}")
        pause_s = LOOK_AGAIN_S


def _watch_progress(client: Client, view: RunView, screen: Screen, over: threading.Event) -> None:
    for progress in client.progress(view.id, follow=True):
        if over.is_set():
            return
        if is_worth_showing(progress):
            screen.status(f"{view.id}  {progress_words(progress, price_known=view.price_known)}")


def is_worth_showing(progress: RunProgress) -> bool:
    return progress.status not in ENDED and bool(progress.step or progress.until)


def _watch_events(client: Client, view: RunView, screen: Screen, over: threading.Event) -> None:
    for record in client.events(view.id, follow=True):
        if over.is_set():
            return
        if not isinstance(record.event, TOLD_EVENTS):
            continue
        reason = getattr(record.event, "reason", None)
        screen.tell(reason.text if isinstance(reason, Reason) else event_line(record))
