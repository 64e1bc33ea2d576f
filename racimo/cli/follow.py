"""Following a run until it ends: its output, why it waits, what happens to it, and a live line for training.

Ctrl-C ends the following, never the run.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from racimo.cli.console import is_terminal, talk, width, write_json
from racimo.cli.render import (
    come_back,
    ended_words,
    event_line,
    failure_lines,
    log_text,
    progress_words,
    status_words,
    whole_failure,
)
from racimo.client.api import Client
from racimo.control.views import LogLine, RunProgress, RunView
from racimo.spec.errors import ExitCode, RacimoError
from racimo.state import events
from racimo.state.nouns import ENDED, Failure, Reason

FIRST_LOOK_S = 0.5
"""A run that has not started by then gets its reason shown."""
LOOK_AGAIN_S = 2.0
SLOW_START_S = 5.0
"""A run that has its devices and no process on them for so long is said to wait, even to who wants no talk."""
LAST_STEP_S = 0.6
PROGRESS_LINE_S = 15.0
"""Between progress lines where there is no terminal."""
JOIN_S = 1.0
REMEMBERED_LINES = 500
"""Newest lines of a run's output in which its traceback is looked for, so that it is not shown twice."""

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

AWAY_CODES = ("waits-lease", "waits-state", "node-silent")
"""Reasons of a run that waits for a node that does not answer."""

Logs = Literal["text", "text to stderr", "json"]
"""What becomes of the lines that the workers print."""
Watcher = Callable[[Client, RunView, "Screen", threading.Event], None]


class Screen:
    """Where several threads write: whole lines, and one live line at the bottom of a terminal."""

    def __init__(self, *, quiet: bool, logs: Logs = "text") -> None:
        self._lock = threading.Lock()
        self._quiet = quiet
        self._logs: Logs = logs
        self._newest: deque[LogLine] = deque(maxlen=REMEMBERED_LINES)
        self._live = is_terminal(sys.stderr) and not quiet
        self._status = ""
        self._told_s = 0.0
        self._closed = False

    def log(self, line: LogLine, *, with_worker: bool) -> None:
        self._newest.append(line)
        stream = sys.stderr if line.stream == "err" or self._logs == "text to stderr" else sys.stdout
        with self._lock:
            self._erase()
            if self._logs == "json":
                write_json(line)
            else:
                print(log_text(line, with_worker=with_worker), file=stream, flush=True)
            self._draw()

    def has_shown(self, failure: Failure) -> bool:
        """Whether the failing worker printed this traceback itself."""
        shown = {line.text for line in self._newest if not failure.worker or line.worker == failure.worker}
        return bool(failure.traceback) and shown.issuperset(failure.traceback.rstrip("\n").split("\n"))

    def tell(self, text: str, *, even_if_quiet: bool = False) -> None:
        with self._lock:
            if (even_if_quiet or not self._quiet) and not self._closed:
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


def follow(
    client: Client,
    view: RunView,
    *,
    as_json: bool = False,
    quiet: bool = False,
    came_back: bool = False,
    worker: str | int = "",
    tail: int | None = None,
) -> int:
    """Shows a run until it ends; the command's exit code. `came_back`: it was submitted earlier, so with `as_json`
    its lines are the data (after a submit the final view is); `worker` and `tail` choose among its lines."""
    logs: Logs = "text" if not as_json else "json" if came_back else "text to stderr"
    screen = Screen(quiet=quiet, logs=logs)
    over = threading.Event()
    threads: list[threading.Thread] = []
    if not came_back:
        screen.tell(f"{view.id} submitted")
    if view.status not in ENDED:
        threads = _start_watchers(client, view, screen, over)
    try:
        for line in client.logs(view.id, follow=True, worker=worker, tail=tail):
            screen.log(line, with_worker=view.most > 1 and worker == "")
        final = client.run(view.id)
        if final.status not in ENDED:
            final = client.wait(view.id)
    except KeyboardInterrupt:
        screen.close()
        print(f"\n{come_back(view.id)}", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except RacimoError as error:
        if error.code != "unreachable":
            raise
        hint = f"{error.hint}\nracimo logs -f {view.id}   # then goes on from there"
        raise RacimoError(error.code, error.message, hint.lstrip()) from None
    finally:
        over.set()
        screen.close()
    deadline_s = time.monotonic() + JOIN_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    if as_json and not came_back:
        write_json(final)
    return finish(client, final, screen, quiet=quiet)


def finish(client: Client, view: RunView, screen: Screen, *, quiet: bool) -> int:
    """Says how the run ended; the exit code."""
    if view.status == "succeeded":
        words = [] if quiet else _success_words(client, view)
        if words:
            talk(f"{view.id} {'; '.join(words)}")
        return ExitCode.OK
    failure = whole_failure(view)
    if failure is None:
        talk(f"{view.id} {status_words(view)}")
        return ExitCode.RUN_FAILED
    print("\n".join(failure_lines(failure, with_traceback=not screen.has_shown(failure))), file=sys.stderr)
    told = view.reason is None or view.reason.text.startswith(failure.message)
    talk(f"{view.id} {view.status if told else status_words(view)}")
    return ExitCode.RUN_FAILED


def _success_words(client: Client, view: RunView) -> list[str]:
    """Of a training run how far it came; of any run how to fetch what it wrote, if it wrote something."""
    words = ["  ".join(ended_words(_with_last_step(client, view)))] if view.kind == "train" else []
    try:
        has_outputs = bool(client.outputs(view.id))
    except RacimoError as error:  # the run has succeeded all the same
        return [*words, f"its outputs cannot be listed: {error.message}"]
    return [*words, f"outputs: racimo get {view.id}"] if has_outputs else words


def _with_last_step(client: Client, view: RunView) -> RunView:
    """What the workers said of their last step may come a beat after the news of their end."""
    if view.progress is None or not 0 < view.progress.step < view.progress.until:
        return view
    # Nothing can be awaited: the run has ended, and what its last step was makes no event.
    time.sleep(LAST_STEP_S)
    try:
        return client.run(view.id)
    except RacimoError:
        return view  # it has succeeded all the same


def _start_watchers(client: Client, view: RunView, screen: Screen, over: threading.Event) -> list[threading.Thread]:
    threads = [_start(_watch_queue, client.beside(), view, screen, over)]
    if view.kind == "train":
        threads.append(_start(_watch_progress, client.beside(), view, screen, over))
        threads.append(_start(_watch_events, client.beside(), view, screen, over))
    return threads


def _start(target: Watcher, client: Client, view: RunView, screen: Screen, over: threading.Event) -> threading.Thread:
    def run() -> None:
        try:
            target(client, view, screen, over)
        except RacimoError as error:
            # Who follows the output finds the cluster gone too, and says it once.
            if not over.is_set() and error.code != "unreachable":
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
            _watch_start(client, now, screen, over)
            _watch_nodes(client, view.id, screen, over)
            return
        text = now.reason.text if now.reason is not None else "not planned yet"
        if text != said:
            said = text
            screen.tell(f"{view.id} waits: {text}")
        pause_s = LOOK_AGAIN_S


def _watch_start(client: Client, view: RunView, screen: Screen, over: threading.Event) -> None:
    """Says once what a run waits for that has devices but, after `SLOW_START_S`, no process."""
    began_s = time.monotonic()
    now = view
    while now.status == "running" and all(worker.pid is None and worker.exit is None for worker in now.workers):
        passed_s = time.monotonic() - began_s
        if passed_s >= SLOW_START_S:
            reason = client.why(view.id)
            causes = "; ".join(client.cluster().warnings)
            if reason.code == "workers-starting":
                causes = reason.text
            elif not causes:
                causes = f"installing {now.spec.env}" if now.spec.env else "racimo check looks for the cause"
            text = f"{view.id} waits for its workers, which have not started for {passed_s:.0f} s: {causes}"
            screen.tell(text, even_if_quiet=True)
            return
        if over.wait(min(LOOK_AGAIN_S, SLOW_START_S - passed_s)):
            return
        now = client.run(view.id)


def _watch_nodes(client: Client, run: str, screen: Screen, over: threading.Event) -> None:
    """Says what becomes of the run whenever a node of it falls silent or answers again, until it has ended."""
    said: tuple[str, str] | None = None
    while not over.wait(LOOK_AGAIN_S):
        now = client.run(run)
        if now.status in ENDED:
            return
        reason = now.reason if now.reason is not None and now.reason.code in AWAY_CODES else None
        # The seconds in its text change all the time: the first words name the node.
        about = None if reason is None else (reason.code, reason.text.partition(" has not answered")[0])
        if about != said:
            screen.tell(f"{run}: {reason.text if reason is not None else 'its node answers again'}")
        said = about


def _watch_progress(client: Client, view: RunView, screen: Screen, over: threading.Event) -> None:
    for progress in client.progress(view.id, follow=True):
        if over.is_set():
            return
        if is_worth_showing(progress):
            screen.status(f"{view.id}  {progress_words(progress, price_known=view.price_known)}")


def is_worth_showing(progress: RunProgress) -> bool:
    return progress.status not in ENDED and bool(progress.step or progress.until)


def _watch_events(client: Client, view: RunView, screen: Screen, over: threading.Event) -> None:
    known = max((record.seq for record in client.events(view.id)), default=0) if view.attempt else 0
    for record in client.events(view.id, follow=True):
        if over.is_set():
            return
        if record.seq <= known or not isinstance(record.event, TOLD_EVENTS):
            continue
        reason = getattr(record.event, "reason", None)
        screen.tell(reason.text if isinstance(reason, Reason) else event_line(record))
