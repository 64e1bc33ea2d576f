"""The main job, from nothing to a proof (`make demo`, about two minutes on two cores).

Starts a cluster in a temporary home, trains a small GPT with three workers, SIGKILLs one of them in the middle, trains
the same thing again undisturbed with one worker, shows that the weights are the same bits, and takes all of it down.
Exit code 0 only if they are.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from racimo.client import Client
from racimo.control.views import RunProgress
from racimo.spec.quantity import format_duration
from racimo.spec.run import RunSpec
from racimo.state.events import AttemptPlanned, GenerationAnnounced, WorkersPlanned
from racimo.state.nouns import ENDED

GPT_FOLDER = Path(__file__).parent / "gpt"
RACIMO = str(Path(sys.executable).parent / "racimo")
NUM_STEPS = 500
KILL_AT_STEP = 200
WORKERS = "2..3"
SLOTS = 3
PRICE_PER_DEVICE_HOUR = 0.05
PLAIN_LINE_EVERY_S = 4.0
EVENTS_END_S = 5.0
CHART_ROWS, CHART_COLUMNS = 9, 60


class Screen:
    """A live line at the bottom of a terminal; elsewhere a plain line now and then."""

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()
        self._bold = self._live and not os.environ.get("NO_COLOR")
        self._line = ""
        self._shown_s = 0.0
        self._start_s = time.monotonic()
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        with self._lock:
            self._erase()
            print(text, flush=True)
            self._draw()

    def title(self, text: str) -> None:
        elapsed = format_duration(time.monotonic() - self._start_s)
        self.say(f"\n\x1b[1m{text}\x1b[0m" if self._bold else f"\n{text}  (after {elapsed})")

    def status(self, text: str) -> None:
        if self._live:
            with self._lock:
                self._erase()
                self._line = text[: shutil.get_terminal_size().columns - 1]
                self._draw()
        elif time.monotonic() - self._shown_s >= PLAIN_LINE_EVERY_S:
            self._shown_s = time.monotonic()
            print(text, flush=True)

    def end_status(self) -> None:
        with self._lock:
            self._erase()
            self._line = ""

    def _draw(self) -> None:
        if self._line:
            print(self._line, end="", flush=True)

    def _erase(self) -> None:
        if self._line:
            print("\r\x1b[K", end="")


class Cluster:
    """A cluster of its own in a temporary home. Whatever happens in the `with`, nothing of it is left afterwards."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="racimo-demo-"))

    def __enter__(self) -> "Cluster":
        try:
            self.command("up", "--slots", str(SLOTS), "--price", str(PRICE_PER_DEVICE_HOUR))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.command("down")
        shutil.rmtree(self.home, ignore_errors=True)

    def command(self, *words: str) -> None:
        """Shows a command and runs it, as one types it. In a session of its own: Ctrl-C is the demo's to handle."""
        print(f"$ racimo {' '.join(words)}", flush=True)
        environment = os.environ | {"RACIMO_HOME": str(self.home)}
        subprocess.run([RACIMO, *words], env=environment, check=True, start_new_session=True)


def main() -> int:
    screen = Screen()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        screen.title("A cluster on this machine")
        with Cluster() as cluster, Client(home=cluster.home, may_start=False, say=screen.say) as client:
            return show(cluster, client, screen)
    except KeyboardInterrupt:
        screen.say("interrupted: the cluster and all its work have been taken down")
        return 130


def show(cluster: Cluster, client: Client, screen: Screen) -> int:
    screen.title(f"Training with {WORKERS} workers, one of which will be killed at step {KILL_AT_STEP}")
    disturbed = submit(client, "disturbed", WORKERS)
    follow(client, disturbed, screen, kill_at=KILL_AT_STEP)
    losses = {report.step: report.values["loss"] for report in client.reports(disturbed).reports}
    screen.say("\n".join(chart(losses, KILL_AT_STEP)))

    screen.title("The same training once more: one worker, undisturbed")
    undisturbed = submit(client, "undisturbed", 1)
    follow(client, undisturbed, screen)

    screen.title("What the model writes (it has read half a megabyte of Python's reference, byte by byte)")
    prompt, _, text = output(client, disturbed, "sample.txt").partition("\n---\n")
    screen.say(f"{prompt}|{text}".strip())

    screen.title("The weights")
    hashes = {run: output(client, run, "weights.sha256").strip() for run in (disturbed, undisturbed)}
    for run, digest in hashes.items():
        screen.say(f"  {run:<16} {digest}")
    same = len(set(hashes.values())) == 1
    screen.say("  the same, bit for bit" if same else "  DIFFERENT: this is a bug, please report it")

    screen.title("What the cluster remembers")
    cluster.command("ps")
    screen.title("Taking it down")
    return 0 if same else 1


def submit(client: Client, name: str, workers: str | int) -> str:
    spec = RunSpec(name=name, train="train.py:train", config={"steps": NUM_STEPS}, workers=workers)
    return client.submit(spec, root=GPT_FOLDER).id


def follow(client: Client, run: str, screen: Screen, kill_at: int = 0) -> None:
    """The live line until the run has ended; kills a worker on the way if asked. Raises if the run did not succeed."""
    killed_at = 0
    with telling_events(client, run, screen):
        for progress in client.progress(run, follow=True):
            if progress.loss is None or progress.status in ENDED:
                continue
            if killed_at and progress.step > killed_at:
                screen.say(f"  step {progress.step}: the loss goes on, {progress.loss:.3f}")
                killed_at = 0
            if kill_at and progress.step >= kill_at:
                kill_at, killed_at = 0, progress.step
                screen.say(f"  step {progress.step}: {kill_a_worker(client, run)}, loss {progress.loss:.3f}")
            screen.status("  " + progress_words(progress))
    screen.end_status()
    view = client.wait(run)
    if view.status != "succeeded":
        raise SystemExit(f"{run} has {view.status}: {view.failure or view.reason}")
    screen.say(f"  {run}: {NUM_STEPS} steps in {format_duration(view.running_s)}, ${view.cost:.4f}")


def progress_words(progress: RunProgress) -> str:
    rate = f"{progress.tokens_per_s:,.0f} tokens/s" if progress.tokens_per_s else ""
    left = format_duration(progress.remaining_s) if progress.remaining_s is not None else "?"
    workers = f"{progress.num_workers} worker{'s' if progress.num_workers != 1 else ''}"
    return (
        f"step {progress.step}/{progress.until}  loss {progress.loss:.3f}  {rate}  {workers}  "
        f"{left} left  ${progress.cost:.4f} so far"
    )


def kill_a_worker(client: Client, run: str) -> str:
    """SIGKILL, as the kernel's out-of-memory killer or an impatient operator would send it. Says whom it hit."""
    victim = next(worker for worker in client.run(run).workers if worker.status == "ready" and worker.pid)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    return f"SIGKILL to worker {victim.index} (process {victim.pid})"


@contextlib.contextmanager
def telling_events(client: Client, run: str, screen: Screen) -> Iterator[None]:
    """Says beside the live line what the cluster decides about the run, in the cluster's own words."""

    over = threading.Event()

    def tell() -> None:
        with client.beside() as other:
            for record in other.events(run, follow=True):
                if over.is_set():
                    return
                if isinstance(record.event, AttemptPlanned | GenerationAnnounced | WorkersPlanned):
                    screen.say(f"  {run}: {record.event.reason.text}")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
        thread.join(EVENTS_END_S)
    finally:
        over.set()


def output(client: Client, run: str, path: str) -> str:
    return b"".join(client.read_output(run, path)).decode()


def chart(losses: dict[int, float], killed_at: int) -> list[str]:
    """The loss over the steps as text; where the worker was killed there is a bar of `|`."""
    points = sorted(losses.items())
    columns: list[list[float]] = [[] for _ in range(CHART_COLUMNS)]
    for step, loss in points:
        columns[min((step - 1) * CHART_COLUMNS // NUM_STEPS, CHART_COLUMNS - 1)].append(loss)
    means = [sum(values) / len(values) if values else None for values in columns]
    known = [mean for mean in means if mean is not None]
    if not known:
        return []
    low, high = min(known), max(known)
    kill_column = (killed_at - 1) * CHART_COLUMNS // NUM_STEPS
    grid = [["|" if column == kill_column else " " for column in range(CHART_COLUMNS)] for _ in range(CHART_ROWS)]
    for column, mean in enumerate(means):
        if mean is not None:
            row = round((high - mean) / (high - low or 1.0) * (CHART_ROWS - 1))
            grid[row][column] = "*"
    labels = {0: f"{high:.2f}", CHART_ROWS - 1: f"{low:.2f}"}
    lines = [f"  {labels.get(row, ''):>6} {''.join(cells)}" for row, cells in enumerate(grid)]
    return [*lines, f"  {'loss':>6} {'^ SIGKILL'.rjust(kill_column + len('^ SIGKILL'))}"]


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
