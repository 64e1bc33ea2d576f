"""The newest progress of live workers: pulled from the agent while somebody follows, or once when somebody asks."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path

import msgspec

from racimo.agent.protocol import Progress, ProgressBatch, PullProgress
from racimo.control.carrier import Carrier
from racimo.control.loop import Loop
from racimo.spec.errors import RacimoError
from racimo.state.nouns import Run, parse_worker_id

MIN_INTERVAL_S = 0.25
"""Followers hear at most 4 times a second."""
PULL_WAIT_S = 30.0
MAX_REMEMBERED_RUNS = 1_000
ASK_TIMEOUT_S = 1.0
LAST_LINE_BYTES = 8_192

log = logging.getLogger("racimo.control.progress")


class Commit(msgspec.Struct, frozen=True):
    """What is needed here of a line of `steps.jsonl`."""

    step: int
    generation: int = 0
    loss: float | None = None
    worker: str = ""


class ProgressBoard:
    """`newest` by run; of ended runs the last that was seen, for as many runs as bounded."""

    def __init__(self, carrier: Carrier, workers_dir: Path) -> None:
        self._carrier = carrier
        self._workers_dir = workers_dir
        self._recalled: set[str] = set()
        self._newest: dict[str, dict[str, Progress]] = {}
        self._asked_at_s = 0.0
        self._followers = 0
        self._puller: asyncio.Task[None] | None = None
        self._pulse = asyncio.Event()

    def of_run(self, run: str) -> list[Progress]:
        return list(self._newest.get(run, {}).values())

    async def refresh(self) -> None:
        """Asks the agent, unless that was done within `MIN_INTERVAL_S`. Without an agent what is known stays."""
        if not self._carrier.connected_nodes or time.monotonic() - self._asked_at_s < MIN_INTERVAL_S:
            return
        self._asked_at_s = time.monotonic()
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                self._keep(await self._carrier.request(self._carrier.local_node, PullProgress(after=-1)))
        except (RacimoError, TimeoutError) as error:
            log.info("no progress from the agent: %s", error)

    async def recall(self, runs: Iterable[Run]) -> None:
        """Learns how far ended training runs came, from the commit logs of their workers; once for each run."""
        for run in runs:
            if run.ended and run.spec.kind == "train" and run.id not in self._recalled:
                self._recalled.add(run.id)
                last = await asyncio.to_thread(last_commit, self._workers_dir / run.id)
                if last is not None:
                    self._remember(run.id, last, until=last.step if run.status == "succeeded" else 0)

    def _remember(self, run: str, last: Commit, until: int) -> None:
        known = max(self._newest.pop(run, {}).values(), key=lambda one: one.step, default=Progress(worker=last.worker))
        newest = msgspec.structs.replace(
            known,
            worker=last.worker,
            generation=last.generation,
            step=last.step,
            until=max(known.until, until),
            loss=last.loss if last.loss is not None else known.loss,
            phase="done",
        )
        self._newest[run] = {last.worker: newest}
        self._forget_oldest()

    async def changes(self, loop: Loop, run: str) -> AsyncGenerator[None, None]:
        """One item at once and one per change of anybody's progress (at most one per `MIN_INTERVAL_S`) or of the run;
        pulling goes on as long as somebody iterates."""
        self._followers += 1
        if self._puller is None:
            self._puller = asyncio.create_task(self._pull(), name="progress")
        try:
            while True:
                news, of_run = self._pulse, loop.pulse(run)
                yield
                waits = [asyncio.ensure_future(pulse.wait()) for pulse in (news, of_run)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
        finally:
            self._followers -= 1
            if self._followers == 0 and self._puller is not None:
                self._puller.cancel()
                self._puller = None

    async def _pull(self) -> None:
        number = -1
        while True:
            began_s = time.monotonic()
            try:
                batch = await self._carrier.request(
                    self._carrier.local_node, PullProgress(after=number, wait_s=PULL_WAIT_S)
                )
            except RacimoError as error:
                log.info("no progress from the agent: %s", error.message)
                number = -1
                await asyncio.sleep(1.0)
                continue
            number = self._keep(batch)
            pulse, self._pulse = self._pulse, asyncio.Event()
            pulse.set()
            await asyncio.sleep(max(0.0, began_s + MIN_INTERVAL_S - time.monotonic()))

    def _keep(self, batch: object) -> int:
        assert isinstance(batch, ProgressBatch)
        for progress in batch.progress:
            run, attempt, _ = parse_worker_id(progress.worker)
            known = self._newest.pop(run, {})  # moved to the end: the longest untouched run is forgotten first
            prefix = f"{run}/{attempt}/"
            self._newest[run] = {name: value for name, value in known.items() if name.startswith(prefix)}
            self._newest[run][progress.worker] = progress
        self._forget_oldest()
        return batch.number

    def _forget_oldest(self) -> None:
        while len(self._newest) > MAX_REMEMBERED_RUNS:
            run = next(iter(self._newest))
            del self._newest[run]
            self._recalled.discard(run)


def last_commit(folder: Path) -> Commit | None:
    """The newest commit in any `ATTEMPT/INDEX/steps.jsonl` below a run's folder, named by that worker."""
    newest: Commit | None = None
    for path in folder.glob("*/*/steps.jsonl"):
        try:
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - LAST_LINE_BYTES))
                line = file.read().rstrip(b"\n").rpartition(b"\n")[2]
            commit = msgspec.json.decode(line, type=Commit)
        except (OSError, msgspec.MsgspecError):
            continue  # deleted meanwhile, or cut off in the middle of a line
        if newest is None or commit.step > newest.step:
            worker = "/".join((folder.name, *path.parts[-3:-1]))
            newest = msgspec.structs.replace(commit, worker=worker)
    return newest
