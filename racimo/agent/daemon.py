"""The agent as a whole: answers control's requests, hears its workers, and stays out of the way otherwise."""

import asyncio
import hmac
import shutil
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from racimo.act.ray_status import ray_notes
from racimo.agent import processes
from racimo.agent.beats import Waits, beat_for_ever
from racimo.agent.blobs import BlobStore
from racimo.agent.entry import READY_FILE, Entry, read_ready
from racimo.agent.frames import encode_frame
from racimo.agent.inotify import FileWatcher
from racimo.agent.lease import Lease
from racimo.agent.measure import measure_usage
from racimo.agent.neighbours import Neighbours
from racimo.agent.propose_protocol import AskProposer, Proposed
from racimo.agent.proposers import Proposers
from racimo.agent.protocol import (
    Announce,
    CheckpointSaved,
    ControlWelcome,
    EventBatch,
    ForgetRun,
    LinkAccepted,
    ListOutputs,
    NewGeneration,
    Ok,
    PleaseLeave,
    PleasePause,
    Progress,
    ProgressBatch,
    PullEvents,
    PullLogs,
    PullProgress,
    Reachable,
    ReadLog,
    ReadOutput,
    ReadReports,
    Ready,
    ReplyBody,
    Report,
    RequestBody,
    RunSlice,
    Shutdown,
    SliceDone,
    StartWorker,
    StopWorker,
    Usage,
    WorkerHello,
    WorkerMessage,
)
from racimo.agent.pulse import Pulse
from racimo.agent.reading import Reading
from racimo.agent.runs import Runs, newest_run_number
from racimo.agent.server import Server
from racimo.agent.spool import Spool
from racimo.agent.stopping import stop_worker, terminate
from racimo.agent.uplink import Uplink
from racimo.agent.watch import Watch
from racimo.agent.whole_file import write_whole
from racimo.agent.workers import Workers
from racimo.spec.config import JoinConfig, parse_token
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.state.events import WorkerReady
from racimo.state.nouns import Node

MAX_WAIT_S = 60.0
MAX_EVENTS = 5_000
BEAT_IDLE_S = 30.0
"""On the socket, where an agent that is gone is noticed by its connection."""
WORKER_PORTS = (7900, 8799)
"""Where workers listen for those of their run on other nodes (first, last)."""


class Agent:
    """One per node and home. `stopped` is set when it is to leave; `ends_all` tells whether everything has ended."""

    def __init__(self, home: Home, node: Node) -> None:
        self.stopped = asyncio.Event()
        self.ends_all = False
        self._home, self._node = home, node
        self._instance = uuid.uuid4().hex
        self._began_s = time.monotonic()
        self._spool = Spool(home.node_dir / "events.jsonl")
        self._blobs = BlobStore(home.node_dir / "blobs")
        self._runs = Runs(home)
        self._files = FileWatcher()
        self._progress_number = 0
        self._progress_changed = Pulse()
        self.workers = Workers(home, node, self._spool, self._blobs, lambda *ask: self._neighbours.fetch_state(*ask))
        self.workers.adopt_all()
        self._neighbours = Neighbours(home, self._blobs, self.workers.environments)
        self._reading = Reading(home, self.workers, self._runs, self._files)
        self._waits = Waits(self.workers)
        self._proposers = Proposers(self.workers)
        self._link_tasks: list[asyncio.Task[None]] = []
        self._address_given = False
        self._watch = Watch(home, node.host, self.workers, self._runs, self._spool, self._files)
        self.server = Server(
            welcome=self._welcome,
            answer=self.answer,
            beat=lambda writer: self._beat(writer, LinkAccepted(cluster="", version="", beat_idle_s=BEAT_IDLE_S)),
            worker_connected=self._worker_connected,
            worker_said=self._worker_said,
            worker_left=self._worker_left,
        )
        self._answers: dict[type, Callable[[Any], Awaitable[ReplyBody]]] = {
            StartWorker: self._start_worker,
            StopWorker: self._stop_worker,
            Announce: self._announce,
            RunSlice: self._run_slice,
            AskProposer: self._proposers.ask,
            PullEvents: self._pull_events,
            ReadLog: self._reading.read_log,
            PullLogs: self._reading.pull_logs,
            ListOutputs: self._reading.list_outputs,
            ReadOutput: self._reading.read_output,
            PullProgress: self._pull_progress,
            ReadReports: self._read_reports,
            Usage: self._usage,
            ForgetRun: self._forget_run,
            Shutdown: self._shutdown,
            **self._neighbours.answers,
        }

    def join(self, config: JoinConfig) -> None:
        """Keeps a link to the control process on another machine."""
        self._address_given = bool(config.address_of_this_node)
        lease = Lease(self._home.node_dir / "contact.json", self.workers.end_opaque)
        uplink = Uplink(
            self._home, config, lease,
            welcome=self._welcome, answer=self.answer, beat=self._beat, linked_from=self._linked_from,
        )  # fmt: skip
        self._link_tasks += [
            asyncio.create_task(uplink.run(), name="uplink"),
            asyncio.create_task(lease.watch(), name="lease"),
        ]

    async def answer(self, body: RequestBody) -> ReplyBody:
        """One request. `RacimoError` becomes `Refused`."""
        handler = self._answers.get(type(body))
        if handler is None:
            raise RacimoError("invalid-request", f"the agent does not answer {type(body).__name__} here")
        return await handler(body)

    async def close(self) -> None:
        """Lets go of everything; workers and zygotes live on unless `ends_all`."""
        for task in self._link_tasks:
            task.cancel()
        await asyncio.gather(*self._link_tasks, return_exceptions=True)
        self._waits.close()
        self.workers.slices.close()
        await self._watch.close()
        await self.server.close()
        await self._neighbours.close()
        await self.workers.zygotes.close(end_zygotes=self.ends_all)
        self._reading.close()
        self._runs.close()
        self._files.close()
        self._spool.close()

    def _welcome(self) -> ControlWelcome:
        unacknowledged = [
            entry.state
            for entry in self.workers.entries.values()
            if entry.live or (entry.event_number or 0) in self._spool.pending
        ]
        return ControlWelcome(
            node=self._node,
            instance=self._instance,
            workers=tuple(unacknowledged),
            warnings=self._warnings,
            newest_run=newest_run_number(self._home),
        )

    # The way to control

    async def _beat(self, writer: asyncio.StreamWriter, accepted: LinkAccepted) -> None:
        await beat_for_ever(writer, self.workers, self._waits, busy_s=accepted.beat_busy_s, idle_s=accepted.beat_idle_s)

    async def serve_peers(self) -> None:
        """Serves other agents where this node has an address, and lets the node say so."""
        if self._node.address:
            self._node = (await self._neighbours.serve_at(self._node.address)).of(self._node)
            self.workers.set_node(self._node)

    async def _linked_from(self, address: str) -> None:
        """How the node is seen by the head; that is its address, unless it was told another."""
        if self._node.address != address and not self._address_given:
            self._node = msgspec.structs.replace(self._node, address=address)
            self.workers.set_node(self._node)
            for entry in self.workers.live:
                self._tell_reachable(entry)
        await self.serve_peers()

    # What control asks

    async def _start_worker(self, message: StartWorker) -> ReplyBody:
        reply = self.workers.start(message)
        self._waits.changed.beat()
        return reply

    async def _stop_worker(self, message: StopWorker) -> ReplyBody:
        entry = self.workers.entries.get(message.worker)
        if entry is None:
            await self.workers.bury(message.worker)
        else:
            stop_worker(entry, message)
        return Ok()

    async def _announce(self, message: Announce) -> ReplyBody:
        if self._runs.announce(message):
            frame = encode_frame(_new_generation(message))
            for entry in self.workers.of_run(message.run):
                if entry.live and entry.attempt == message.attempt:
                    entry.send(frame)
        return Ok()

    async def _run_slice(self, message: RunSlice) -> ReplyBody:
        entry = self.workers.entries.get(message.worker)
        if entry is not None and entry.live:
            self.workers.prepaid.extend(entry, message.order.grant.paid_s)
            self.workers.slices.order(entry, message)
        return Ok()

    async def _pull_events(self, message: PullEvents) -> ReplyBody:
        limit = min(max(message.limit, 1), MAX_EVENTS)
        events = self._spool.take(message.after, limit)
        if not events and message.wait_s > 0 and await self._spool.changed.wait(min(message.wait_s, MAX_WAIT_S)):
            events = self._spool.take(message.after, limit)
        return EventBatch(events=events)

    async def _pull_progress(self, message: PullProgress) -> ReplyBody:
        if message.after >= self._progress_number and message.wait_s > 0:
            await self._progress_changed.wait(min(message.wait_s, MAX_WAIT_S))
        newest = [entry.progress for entry in self.workers.live if entry.progress is not None]
        return ProgressBatch(number=self._progress_number, progress=tuple(newest))

    async def _read_reports(self, message: ReadReports) -> ReplyBody:
        return self._runs.read_reports(message.run, max(message.after, 0), max(message.limit, 1))

    async def _usage(self, message: Usage) -> ReplyBody:
        return await asyncio.to_thread(
            measure_usage, self._home, self._records(), self._warnings, self._began_s, ports=message.ports
        )

    def _records(self) -> list[processes.ProcessRecord]:
        paths = self._home.processes_dir.glob("*.json")
        services = [record for path in paths if (record := processes.read_process_file(path)) is not None]
        workers = [
            msgspec.structs.replace(entry.record, role=entry.name)
            for entry in self.workers.live
            if entry.record is not None
        ]
        return [record for record in services + workers if processes.is_alive(record)]

    @property
    def _warnings(self) -> tuple[str, ...]:
        return (*self.workers.zygotes.warnings, *self.workers.environments.warnings, *ray_notes(self._home))

    async def _forget_run(self, message: ForgetRun) -> ReplyBody:
        live = [entry.name for entry in self.workers.of_run(message.run) if entry.live]
        if live:
            raise RacimoError("wrong-state", f"{message.run} still has {len(live)} live workers here: {live[0]}")
        if not message.run or "/" in message.run or message.run.startswith("."):
            raise RacimoError("invalid-request", f"not a run id: {message.run!r}")
        self.workers.forget(message.run)
        self._runs.forget(message.run)
        for name in ("workers", "files", "runs"):
            folder = self._home.node_dir / name / message.run
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return Ok()

    async def _shutdown(self, message: Shutdown) -> ReplyBody:
        for entry in self.workers.live:
            if entry.record is None and entry.start_task is not None:
                entry.start_task.cancel()
            else:
                terminate(entry, message.grace_s)
        await self.workers.settle()
        self.ends_all = True
        asyncio.get_running_loop().call_soon(self.stopped.set)
        return Ok()

    # What workers say

    def _worker_connected(self, hello: WorkerHello, writer: asyncio.StreamWriter) -> bool:
        entry = self.workers.entries.get(hello.worker)
        if entry is None or not entry.live:
            print(f"agent: {hello.worker} (pid {hello.pid}) is not a live worker of mine", file=sys.stderr)
            return False
        entry.writer = writer
        self._tell_reachable(entry)
        generation = self._runs.generation(entry.run)
        if generation is not None and generation.attempt == entry.attempt:
            entry.send(encode_frame(_new_generation(generation)))
        self.workers.slices.connected(entry)
        self._proposers.connected(entry)
        if entry.wish:
            entry.send(encode_frame(PleasePause() if entry.wish == "pause" else PleaseLeave()))
        return True

    def _tell_reachable(self, entry: Entry) -> None:
        """Where the worker may listen for those of its attempt on other nodes."""
        if not self._node.address:
            return
        try:
            secret = parse_token(self._home.token_file.read_text()).secret
        except (OSError, RacimoError) as error:
            print(f"agent: {entry.name} cannot be reached from other nodes: {error}", file=sys.stderr)
            entry.send(encode_frame(Reachable(node=self._node.id, address="", ports=WORKER_PORTS, key=b"")))
            return
        key = hmac.digest(secret.encode(), f"mesh {entry.run}/{entry.attempt}".encode(), "sha256")
        told = Reachable(node=self._node.id, address=self._node.address, ports=WORKER_PORTS, key=key)
        entry.send(encode_frame(told))

    def _worker_left(self, worker: str, writer: asyncio.StreamWriter) -> None:
        entry = self.workers.entries.get(worker)
        if entry is not None and entry.writer is writer:
            entry.writer = None

    def _worker_said(self, worker: str, message: WorkerMessage) -> None:
        entry = self.workers.entries[worker]
        if isinstance(message, Progress):
            self._note_progress(entry, message)
        elif isinstance(message, Report):
            self._runs.report(entry.run, message)
        elif isinstance(message, Ready):
            self._note_ready(entry, message)
        elif isinstance(message, SliceDone):
            self.workers.slices.done(entry, message)
        elif isinstance(message, Proposed):
            self._proposers.said(worker, message)
        elif isinstance(message, CheckpointSaved):
            print(f"agent: {worker} saved step {message.step} at {message.path}", file=sys.stderr)

    def _note_progress(self, entry: Entry, progress: Progress) -> None:
        if entry.progress is None or entry.progress.phase_number != progress.phase_number:
            entry.progress_at_s = time.monotonic()
        entry.progress = progress
        self._waits.note(entry)
        commits = self.workers.commits
        commits[entry.run] = max(commits.get(entry.run, 0), progress.step)
        self._progress_number += 1
        self._progress_changed.beat()

    def _note_ready(self, entry: Entry, ready: Ready) -> None:
        """Told to control once, however often the worker reconnects."""
        entry.ready = ready
        if read_ready(entry.directory) == ready:
            return
        self._spool.append(
            WorkerReady(
                run=entry.run,
                attempt=entry.attempt,
                index=entry.index,
                address=ready.address,
                micro_shards=ready.micro_shards,
                numerics=ready.numerics,
                holds=ready.holds,
            )
        )
        write_whole(entry.directory / READY_FILE, msgspec.json.encode(ready))


def _new_generation(message: Announce) -> NewGeneration:
    return NewGeneration(attempt=message.attempt, number=message.number, members=message.members, reason=message.reason)
