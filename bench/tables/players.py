"""Many simulated runs on both cores: orders to processes in the peers' interpreter, answers back as they come.

What a peer did follows from its version, its settings and the seed alone; it is kept in `.venvs/tune/played/`, so that
only ours is computed anew. Delete that folder to have everything computed.
"""

import hashlib
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from bench.harness import Deadline, say
from bench.peers import ROOT, clean_environment
from bench.tables.play import HORIZON_GENERATIONS, HORIZON_TRIALS, Answer, Order
from bench.tune_peers import TUNE_PACKAGES, TUNE_VENV, tune_python

PROCESSES = int(os.environ.get("BENCH_PROCESSES", "2"))
SAY_EVERY = 500


def played(orders: Iterable[Order], deadline: Deadline) -> dict[Order, Answer]:
    """The answers, in as far as they came before the deadline; an order that failed is among them, with its error."""
    orders = list(orders)
    kept = _Kept(TUNE_VENV / "played")
    answers = {order: found for order in orders if (found := kept.find(order)) is not None}
    waiting: queue.SimpleQueue[Order] = queue.SimpleQueue()
    for order in orders:
        if order not in answers:
            waiting.put(order)
    total = waiting.qsize()
    lock = threading.Lock()

    def take(told: Answer) -> None:
        with lock:
            answers[told.order] = told
            kept.keep(told)
            if told.error:
                say(f"  {told.order.system} failed on {told.order.objective}, seed {told.order.seed}: {told.error}")
            if (done := total - waiting.qsize()) % SAY_EVERY == 0:
                say(f"  {done} of {total} runs, {deadline.left_s:.0f} s left")

    threads = [threading.Thread(target=_feed, args=(waiting, take, deadline)) for _ in range(min(PROCESSES, total))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _feed(waiting: "queue.SimpleQueue[Order]", take: Callable[[Answer], None], deadline: Deadline) -> None:
    """One process, from its start to its end."""
    environment = clean_environment(
        PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONHASHSEED="0"
    )
    log = TUNE_VENV / f"played-{threading.get_ident()}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [str(tune_python()), "-m", "bench.tables.play"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            cwd=ROOT,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            while deadline.left_s > 0:
                try:
                    order = waiting.get_nowait()
                except queue.Empty:
                    break
                process.stdin.write(msgspec.json.encode(order) + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError(f"the player ended; see {log}")
                take(msgspec.json.decode(line, type=Answer))
        finally:
            process.stdin.close()
            process.wait()
    log.unlink()


class _Kept:
    """Answers of peers in files, one for each system and horizon."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, dict[Order, Answer]] = {}

    def find(self, order: Order) -> Answer | None:
        return self._of(order.system).get(order) if _is_peer(order) else None

    def keep(self, told: Answer) -> None:
        if not _is_peer(told.order):
            return
        self._of(told.order.system)[told.order] = told
        with self._path(told.order.system).open("ab") as file:
            file.write(msgspec.json.encode(told) + b"\n")

    def _of(self, system: str) -> dict[Order, Answer]:
        if system not in self._known:
            path = self._path(system)
            path.parent.mkdir(exist_ok=True)
            lines = path.read_bytes().split(b"\n") if path.exists() else []
            answers = [msgspec.json.decode(line, type=Answer) for line in lines if line.endswith(b"}")]
            self._known[system] = {one.order: one for one in answers}
        return self._known[system]

    def _path(self, system: str) -> Path:
        """Another version of a peer, of its adapter or of the horizon is another file."""
        tables = ROOT / "bench" / "tables"
        sources = [tables / "clock.py", tables / "objectives.py", tables / f"peers_{system.partition('-')[0]}.py"]
        seen = hashlib.sha256("\n".join([*TUNE_PACKAGES, f"{HORIZON_TRIALS} {HORIZON_GENERATIONS}"]).encode())
        for source in sources:
            seen.update(source.read_bytes())
        return self._folder / f"{system}-{seen.hexdigest()[:12]}.jsonl"


def _is_peer(order: Order) -> bool:
    return not order.system.startswith("racimo")
