"""The newest progress of live workers: pulled from their nodes while somebody follows, or once when somebody asks."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path

import msgspec

from racimo.agent.protocol import LogChunk, Progress, ProgressBatch, PullProgress, ReadLog
from racimo.control.carrier import Carrier
from racimo.control.loop import Loop
from racimo.spec.errors import RacimoError
from racimo.state.nouns import Run, parse_worker_id, worker_id

MIN_INTERVAL_S = 0.25
"""Followers hear at most 4 times a second."""
PULL_WAIT_S = 30.0
MAX_REMEMBERED_RUNS = 1_000
ASK_TIMEOUT_S = 1.0
RETRY_S = 1.0
MAX_RECALLED_AT_ONCE = 16
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
        self._asked_at_s: dict[str, float] = {}
        self._followed: Counter[str] = Counter()
        self._pullers: dict[str, asyncio.Task[None]] = {}
        self._pulse = asyncio.Event()

    def of_run(self, run: str) -> list[Progress]:
        return list(self._newest.get(run, {}).values())

    async def refresh(self, runs: Iterable[Run]) -> None:
        """Asks the agents that have live workers of these training runs, unless that was done within
        `MIN_INTERVAL_S`. Of those that do not answer what is known stays."""
        nodes = {worker.node for run in runs if run.spec.kind == "train" for worker in run.live_workers}
        now_s = time.monotonic()
        due = [node for node in nodes & self._carrier.connected_nodes if self._is_due(node, now_s)]
        self._asked_at_s.update(dict.fromkeys(due, now_s))
        await asyncio.gather(*(self._ask(node) for node in due))

    def _is_due(self, node: str, now_s: float) -> bool:
        return now_s - self._asked_at_s.get(node, -MIN_INTERVAL_S) >= MIN_INTERVAL_S

    async def _ask(self, node: str) -> None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                self._keep(await self._carrier.request(node, PullProgress(after=-1)))
        except (RacimoError, TimeoutError) as error:
            log.info("no progress from the agent of %s: %s", node, error)

    async def recall(self, runs: Iterable[Run]) -> None:
        """Learns how far ended training runs came, from the commit logs of their workers; once for each run
        if all its nodes answer."""
        due = [run for run in runs if run.ended and run.spec.kind == "train" and run.id not in self._recalled]
        for at in range(0, len(due), MAX_RECALLED_AT_ONCE):
            await asyncio.gather(*(self._recall(run) for run in due[at : at + MAX_RECALLED_AT_ONCE]))

    async def _recall(self, run: Run) -> None:
        if set(run.nodes) <= self._carrier.connected_nodes | {self._carrier.local_node}:
            self._recalled.add(run.id)
        found = [await asyncio.to_thread(last_commit, self._workers_dir / run.id), *await self._elsewhere(run)]
        commits = [commit for commit in found if commit is not None]
        if commits:
            last = max(commits, key=lambda commit: commit.step)
            self._remember(run.id, last, until=last.step if run.status == "succeeded" else 0)

    async def _elsewhere(self, run: Run) -> list[Commit | None]:
        """The newest commits of the last attempt's workers on other nodes, as far as those answer."""
        near = ("", self._carrier.local_node)
        names = [(w.node, worker_id(run.id, w.attempt, w.index)) for w in run.workers.values() if w.node not in near]
        connected = self._carrier.connected_nodes
        return await asyncio.gather(*(self._commit_at(node, name) for node, name in names if node in connected))

    async def _commit_at(self, node: str, worker: str) -> Commit | None:
        body = ReadLog(worker=worker, stream="steps", offset=-LAST_LINE_BYTES, limit=LAST_LINE_BYTES)
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                chunk = await self._carrier.request(node, body)
        except (RacimoError, TimeoutError) as error:
            log.info("no commits of %s from %s: %s", worker, node, error)
            return None
        assert isinstance(chunk, LogChunk)
        return commit_of(chunk.content, worker)

    def _remember(self, run: str, last: Commit, until: int) -> None:
        known = max(self._newest.pop(run, {}).values(), key=lambda one: one.step, default=Progress(worker=last.worker))
        newest = msgspec.structs.replace(
            known,
            worker=last.worker,
            generation=last.generation,
            step=max(known.step, last.step),
            until=max(known.until, until),
            loss=last.loss if last.loss is not None else known.loss,
            phase="done",
        )
        self._newest[run] = {last.worker: newest}
        self._forget_oldest()

    async def changes(self, loop: Loop, run: str) -> AsyncGenerator[None, None]:
        """One item at once and one per change of anybody's progress (at most one per `MIN_INTERVAL_S`) or of the run;
        pulling goes on as long as somebody iterates."""
        self._followed[run] += 1
        try:
            while True:
                self._pull_for(loop)
                news, of_run = self._pulse, loop.pulse(run)
                yield
                waits = [asyncio.ensure_future(pulse.wait()) for pulse in (news, of_run)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
        finally:
            self._followed[run] -= 1
            self._followed += Counter()  # drops what nobody follows
            self._pull_for(loop)

    def _pull_for(self, loop: Loop) -> None:
        """One puller for each node with live workers of a followed run."""
        known = loop.core.state.runs
        nodes = {worker.node for run in self._followed if run in known for worker in known[run].live_workers}
        for node in set(self._pullers) - nodes:
            self._pullers.pop(node).cancel()
        for node in nodes - set(self._pullers):
            self._pullers[node] = asyncio.create_task(self._pull(node), name=f"progress of {node}")

    async def _pull(self, node: str) -> None:
        number = -1
        while True:
            began_s = time.monotonic()
            try:
                batch = await self._carrier.request(node, PullProgress(after=number, wait_s=PULL_WAIT_S))
            except RacimoError as error:
                log.info("no progress from the agent of %s: %s", node, error.message)
                number = -1
                await asyncio.sleep(RETRY_S)
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
            if any(parse_worker_id(name)[1] > attempt for name in known):
                self._newest[run] = known  # a stray on a node that was given up
                continue
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
                content = file.read()
        except OSError:
            continue  # deleted meanwhile
        commit = commit_of(content, "/".join((folder.name, *path.parts[-3:-1])))
        if commit is not None and (newest is None or commit.step > newest.step):
            newest = commit
    return newest


def commit_of(content: bytes, worker: str) -> Commit | None:
    """The last commit of a worker, from the end of its commit log; None if that is cut off in the middle of a line."""
    try:
        commit = msgspec.json.decode(content.rstrip(b"\n").rpartition(b"\n")[2], type=Commit)
    except msgspec.MsgspecError:
        return None
    return msgspec.structs.replace(commit, worker=worker)
