"""What a worker tells about itself: phases to its agent, one line per commit to `steps.jsonl`."""

import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import TextIO

from racimo.agent.exits import IN_STEPS_FILE
from racimo.agent.phases import PhaseNote
from racimo.agent.protocol import Progress
from racimo.worker.link import Link
from racimo.worker.train.alone import ProgressLine
from racimo.worker.train.messages import Outcome

_REMEMBERED_STEPS = 20


class Telemetry:
    """Without a directory the run is one outside a cluster, and shows its progress itself. `keeps_steps`: in
    `steps.jsonl`, which is of one loop."""

    def __init__(self, worker: str, link: Link, directory: str, until: int, keeps_steps: bool = True) -> None:
        self._worker = worker
        self._link = link
        self._index = worker.rsplit("/", 1)[1]
        self._until = until
        self._directory = directory
        self._inside = Path(directory) / IN_STEPS_FILE if directory else None
        if self._inside is not None:
            self._inside.touch()
        self._note = PhaseNote(Path(directory)) if directory else None
        self._file: TextIO | None = None
        if directory and keeps_steps:
            self._file = (Path(directory) / "steps.jsonl").open("a", encoding="utf-8")
        self._alone = None if directory else ProgressLine(until, sys.stderr)
        self._phase_number = 0
        self._step = 0
        self._generation = 0
        self._loss: float | None = None
        self._step_s: float | None = None
        self._committed_at_s: float | None = None
        self._durations_s: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._samples = 0
        self._tokens: float | None = None

    def phase(
        self,
        name: str,
        *,
        waits_for: tuple[int, ...] = (),
        unreachable: Collection[int] = (),
        generation: int | None = None,
    ) -> None:
        """A change of phase, or of whom it waits for. Cheap: the link sends the newest, a few times a second."""
        self._phase_number += 1
        if self._note is not None:
            self._note.write(self._phase_number, name)
        if generation is not None:
            self._generation = generation
        step_s = self._step_s
        self._link.progress(
            Progress(
                worker=self._worker,
                generation=self._generation,
                step=self._step,
                until=self._until,
                phase=name,
                phase_number=self._phase_number,
                waits_for=waits_for,
                unreachable=tuple(index for index in waits_for if index in unreachable),
                loss=self._loss,
                step_s=step_s,
                samples_per_s=self._samples / step_s if step_s else None,
                tokens_per_s=self._tokens / step_s if step_s and self._tokens else None,
            )
        )

    def resumed(self, step: int) -> None:
        self._step = step

    def committed(self, outcome: Outcome, tokens: float | None) -> None:
        """One line: `shards` are those this worker contributed in `generation`, in which the step was reduced, and
        `contributions` everybody's, for a worker that dies before its commit cannot write a line.

        Should a step ever have lines of two generations (its only committer died), those of the newer one count."""
        now_s = time.monotonic()
        self._step = outcome.step
        self._loss = outcome.loss
        self._samples, self._tokens = outcome.num_samples, tokens
        if self._committed_at_s is not None:
            self._durations_s.append(now_s - self._committed_at_s)
            self._step_s = statistics.median(self._durations_s)
        self._committed_at_s = now_s
        if self._alone is not None:
            self._alone.committed(outcome.step, outcome.loss, self._step_s, now_s)
        if self._file is not None:
            line = {
                "step": outcome.step,
                "generation": outcome.generation,
                "t": now_s,
                "shards": outcome.contributions.get(self._index, ()),
                "loss": outcome.loss,
                "contributions": outcome.contributions,
            }
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def committed_before(self) -> int:
        """Steps that earlier attempts of this run committed on this node, as their files say."""
        if not self._directory:
            return 0
        files = Path(self._directory).parent.parent.glob("*/*/steps.jsonl")
        return max((_step_of(line) for file in files for line in file.read_bytes().splitlines()), default=0)

    def close(self) -> None:
        if self._inside is not None:
            self._inside.unlink(missing_ok=True)
        if self._file is not None:
            self._file.close()
        if self._note is not None:
            self._note.close()
            self._note = None


def _step_of(line: bytes) -> int:
    """The step of a line of `steps.jsonl`; 0 for one that a crash or a full disk has torn."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return 0


def say(text: str) -> None:
    """One line for people, in the worker's error log."""
    print(f"racimo: {text}", file=sys.stderr, flush=True)
