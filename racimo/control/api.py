"""What each call of the API does. The table that names them is in `racimo.control.routes`."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from racimo.act.versions import own_versions
from racimo.agent.protocol import ReadReports, ReportBatch, Usage, UsageReply, WorkerOrder
from racimo.control import node_calls, present, usage
from racimo.control.carrier import Carrier
from racimo.control.core import FIRST_EXEC_INDEX, Core
from racimo.control.examine import Examination
from racimo.control.exchange import Exchange, Streams
from racimo.control.log_streams import LogSource
from racimo.control.loop import Loop
from racimo.control.outputs import list_outputs, open_output, read_parts
from racimo.control.progress import ProgressBoard
from racimo.control.secrets import SecretStore
from racimo.control.snapshots import MAX_BLOB_BYTES, SnapshotStore
from racimo.control.views import (
    ClusterView,
    DownView,
    EndedView,
    ExecExitView,
    ExecRequest,
    OkView,
    ReportsView,
    RunProgress,
    RunView,
    ScaleRequest,
    SecretRequest,
    SnapshotRequest,
    SnapshotView,
    SubmitRequest,
)
from racimo.spec.config import read_config
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.spec.quantity import parse_worker_range
from racimo.spec.run import RunSpec
from racimo.state.nouns import Run, worker_id
from racimo.version import PROTOCOL_VERSION, __version__

MAX_LISTED_RUNS = 10_000
MAX_WAIT_S = 60.0
MAX_TAIL_LINES = 100_000
USAGE_TIMEOUT_S = 1.0
EXEC_EXIT_WAIT_S = 10.0
BLOB_PART_BYTES = 2**20


class Api:
    """One method per call. Everything it needs is given: the loop, the carrier and the stores of one cluster."""

    def __init__(
        self, home: Home, cluster: str, address: str, loop: Loop, carrier: Carrier, secrets: SecretStore,
        snapshots: SnapshotStore, shut_down: Callable[[], None],
    ) -> None:  # fmt: skip
        self._home = home
        self._cluster = cluster
        self._address = address
        self._loop = loop
        self._carrier = carrier
        self._secrets = secrets
        self._snapshots = snapshots
        self._shut_down = shut_down
        self._started_wall_s = loop.core.clock.wall_s()
        self._board = ProgressBoard(carrier, home.worker_dir(""))
        self._logs = LogSource(carrier, loop)
        self.streams = Streams()
        self._writing_secrets = asyncio.Lock()
        self._examining = asyncio.Lock()
        self._num_execs = 0

    @property
    def core(self) -> Core:
        return self._loop.core

    # The cluster

    async def healthz(self, exchange: Exchange) -> None:
        await exchange.answer(OkView())

    async def cluster(self, exchange: Exchange) -> None:
        state = self.core.state
        reply = await self._usage()
        runs = state.runs.values()
        num_devices = sum(len(node.devices) for node in state.nodes.values() if node.status == "up")
        num_queued = sum(state.runs[run].status == "queued" for run in state.open_runs)
        view = ClusterView(
            id=self._cluster,
            version=__version__,
            protocol=PROTOCOL_VERSION,
            home=str(self._home.root),
            address=self._address,
            started_wall_s=self._started_wall_s,
            num_devices=num_devices if self._carrier.connected_nodes else 0,
            num_free=max(0, num_devices - len(state.leases)),
            price_per_device_hour=present.price_per_device_hour(state),
            num_queued=num_queued,
            num_running=len(state.open_runs) - num_queued,
            num_ended=len(runs) - len(state.open_runs),
            processes=usage.with_services(self._home.root, reply.processes if reply else ()),
            carrier=config.carrier if (config := read_config(self._home)).bind else "",
            wall_s=self.core.clock.wall_s(),
            versions=own_versions(),
            warnings=(*self.core.notes, *self._warnings(reply)),
        )
        await exchange.answer(view)

    async def nodes(self, exchange: Exchange) -> None:
        reply = await self._usage()
        free_memory, free_disk = (reply.free_memory_bytes, reply.free_disk_bytes) if reply else (0, 0)
        await exchange.answer(present.node_views(self.core.state, free_memory, free_disk, self.core.clock.now_s()))

    async def check(self, exchange: Exchange) -> None:
        """One look at a time: two would measure each other."""
        async with self._examining:
            examination = Examination(
                self._carrier.request, nodes=tuple(self.core.state.nodes.values()),
                connected=self._carrier.connected_nodes, local_node=self._carrier.local_node,
                head_versions=own_versions(),
            )  # fmt: skip
            view = await examination.run()
        await exchange.answer(view)

    async def drain_node(self, exchange: Exchange) -> None:
        await node_calls.drain(self._loop, exchange)

    async def forget_node(self, exchange: Exchange) -> None:
        await node_calls.forget(self._loop, exchange)

    async def backup(self, exchange: Exchange) -> None:
        await node_calls.send_backup(self._home, self._cluster, self._loop, exchange)

    async def shutdown(self, exchange: Exchange) -> None:
        taken = await self._loop.change(lambda core: core.take_down())
        await exchange.answer(DownView(kept=taken.kept, stopped=taken.stopped))
        self._shut_down()

    # Files and secrets

    async def put_snapshot(self, exchange: Exchange) -> None:
        request = await exchange.read(SnapshotRequest)
        identity, missing = await asyncio.to_thread(self._snapshots.put_manifest, request.files)
        await exchange.answer(SnapshotView(id=identity, missing=missing))

    async def put_blob(self, exchange: Exchange) -> None:
        draft = self._snapshots.draft(exchange.path["sha256"])
        try:
            async with contextlib.aclosing(exchange.body_parts(MAX_BLOB_BYTES)) as parts:
                gathered: list[bytes] = []
                size_bytes = 0
                async for part in parts:
                    gathered.append(part)
                    size_bytes += len(part)
                    if size_bytes >= BLOB_PART_BYTES:
                        await asyncio.to_thread(draft.write, b"".join(gathered))
                        gathered, size_bytes = [], 0
            await asyncio.to_thread(draft.write, b"".join(gathered))
            await asyncio.to_thread(draft.finish)
        finally:
            draft.discard()
        await exchange.answer(OkView())

    async def secrets(self, exchange: Exchange) -> None:
        await exchange.answer(self._secrets.names())

    async def put_secret(self, exchange: Exchange) -> None:
        request = await exchange.read(SecretRequest)
        async with self._writing_secrets:
            await asyncio.to_thread(self._secrets.put, exchange.path["name"], request.value)
        await exchange.answer(OkView())

    async def remove_secret(self, exchange: Exchange) -> None:
        async with self._writing_secrets:
            await asyncio.to_thread(self._secrets.remove, exchange.path["name"])
        await exchange.answer(OkView())

    # Runs

    async def submit(self, exchange: Exchange) -> None:
        request = await exchange.read(SubmitRequest)
        spec = request.spec
        if request.request not in self.core.state.requests:
            self._secrets.require(spec.secrets)
            await asyncio.to_thread(self._check_files, spec)
            await self._carrier.met()
        run = await self._loop.change(lambda core: core.submit(spec, request.request))
        await exchange.answer(self._view(self.core.state.runs[run.id], with_workers=True))

    async def runs(self, exchange: Exchange) -> None:
        limit = int(exchange.number("limit", 50, 1, MAX_LISTED_RUNS))
        if exchange.flag("all"):
            limit = MAX_LISTED_RUNS
        shown = list(itertools.islice(reversed(self.core.state.runs.values()), limit))
        await self._learn_progress(shown)
        await exchange.answer([self._view(run, with_workers=False) for run in shown])

    async def run(self, exchange: Exchange) -> None:
        run = self._run(exchange)
        await self._answer_run(exchange, run.id)

    async def wait(self, exchange: Exchange) -> None:
        run = self._run(exchange)
        timeout_s = exchange.number("timeout_s", 30.0, 0.0, MAX_WAIT_S)
        with contextlib.suppress(TimeoutError):  # then it is answered as it is
            async with asyncio.timeout(timeout_s):
                while True:
                    pulse = self._loop.pulse(run.id)
                    if self.core.state.runs[run.id].ended:
                        break
                    await pulse.wait()
        await self._answer_run(exchange, run.id)

    async def stop(self, exchange: Exchange) -> None:
        await self._change_run(exchange, Core.stop)

    async def pause(self, exchange: Exchange) -> None:
        await self._change_run(exchange, Core.pause)

    async def resume(self, exchange: Exchange) -> None:
        await self._change_run(exchange, Core.resume)

    async def scale(self, exchange: Exchange) -> None:
        request = await exchange.read(ScaleRequest)
        try:
            workers = parse_worker_range(request.workers)
        except ValueError as error:
            raise RacimoError("invalid-request", str(error)) from None
        await self._change_run(exchange, lambda core, run: core.scale(run, workers))

    async def why(self, exchange: Exchange) -> None:
        await exchange.answer(self.core.why(self._run(exchange).id))

    # What runs leave and say

    async def outputs(self, exchange: Exchange) -> None:
        run = self._run(exchange)
        await exchange.answer(await asyncio.to_thread(list_outputs, self._home.output_dir(run.id)))

    async def output(self, exchange: Exchange) -> None:
        run = self._run(exchange)
        fd, size_bytes = await asyncio.to_thread(open_output, self._home.output_dir(run.id), exchange.path["path"])
        await exchange.answer_file(read_parts(fd, size_bytes), size_bytes)

    async def reports(self, exchange: Exchange) -> None:
        run = self._run(exchange)
        after = int(exchange.number("after", 0, 0, 2**53))
        reply = await self._carrier.request(self._carrier.local_node, ReadReports(run=run.id, after=after))
        assert isinstance(reply, ReportBatch)
        await exchange.answer(ReportsView(next=reply.next, reports=reply.reports))

    async def logs(self, exchange: Exchange) -> None:
        run = self._run(exchange)
        tail = int(exchange.number("tail", 0, 0, MAX_TAIL_LINES)) if "tail" in exchange.query else None
        worker = self._worker_named(run, exchange.query.get("worker", ""))
        lines = self._logs.lines(run.id, follow=exchange.flag("follow"), worker=worker, tail=tail)
        await self.streams.answer(exchange, lines)

    async def events(self, exchange: Exchange) -> None:
        await self.streams.answer(exchange, self._events(self._run(exchange).id, exchange.flag("follow")))

    async def progress(self, exchange: Exchange) -> None:
        run = self._run(exchange)
        await self.streams.answer(exchange, self._progress_items(run.id, exchange.flag("follow")))

    async def exec(self, exchange: Exchange) -> None:
        run = self._run(exchange)
        request = await exchange.read(ExecRequest)
        beside = self._live_worker(run, request.worker)
        if not request.command:
            raise RacimoError("invalid-request", "exec needs a command", f"racimo exec {run.id} -- COMMAND")
        self._num_execs += 1
        index = FIRST_EXEC_INDEX + int(self.core.clock.now_s() * 1000) * 1000 + self._num_execs % 1000
        order = WorkerOrder(
            worker=worker_id(run.id, run.attempt, index),
            kind="exec",
            command=request.command,
            variables=run.spec.variables,
            secrets=self._secrets.values(run.spec.secrets),
            exec_of=beside,
        )
        await self.streams.answer(exchange, self._exec_items(run.id, order))

    # Within

    def _run(self, exchange: Exchange) -> Run:
        return self.core.run(exchange.path["id"])

    def _view(self, run: Run, with_workers: bool) -> RunView:
        progress = self._run_progress(run) if self._board.of_run(run.id) else None
        return present.run_view(self.core, run, self._home, progress, with_workers)

    def _run_progress(self, run: Run) -> RunProgress:
        price = present.price_per_device_hour(self.core.state)
        return present.run_progress(run, self._board.of_run(run.id), self.core.clock.now_s(), price)

    async def _learn_progress(self, runs: list[Run]) -> None:
        if any(run.spec.kind == "train" and not run.ended for run in runs):
            await self._board.refresh()
        await self._board.recall(runs)

    async def _answer_run(self, exchange: Exchange, run: str) -> None:
        await self._learn_progress([self.core.state.runs[run]])
        await exchange.answer(self._view(self.core.state.runs[run], with_workers=True))

    async def _change_run(self, exchange: Exchange, change: Callable[[Core, str], Run]) -> None:
        run = exchange.path["id"]
        await self._loop.change(lambda core: change(core, run))
        await self._answer_run(exchange, run)

    def _check_files(self, spec: RunSpec) -> None:
        if not spec.snapshot:
            if spec.train:
                raise RacimoError("file-missing", f"{spec.train_file} was not sent: the spec names no snapshot")
            return
        files = self._snapshots.require_complete(spec.snapshot)
        if spec.train and all(file.path != spec.train_file for file in files):
            raise RacimoError("file-missing", f"{spec.train_file} is not among the {len(files)} files that were sent")

    def _worker_named(self, run: Run, name: str) -> str:
        """`1` or `run/attempt/1` as the worker's id; "" for all."""
        if not name:
            return ""
        if name.isdigit():
            return worker_id(run.id, run.attempt, int(name))
        if not name.startswith(f"{run.id}/"):
            raise RacimoError(
                "invalid-request", f"a worker of {run.id} is its index or {run.id}/ATTEMPT/INDEX, not {name!r}"
            )
        return name

    def _live_worker(self, run: Run, name: str) -> str:
        live = [
            worker_id(run.id, worker.attempt, worker.index) for worker in run.live_workers if worker.pid is not None
        ]
        wanted = self._worker_named(run, name)
        if not live or (wanted and wanted not in live):
            what = wanted or f"a worker of {run.id} ({run.status})"
            raise RacimoError("wrong-state", f"{what} is not running", f"racimo show {run.id}")
        return wanted or live[0]

    async def _usage(self) -> UsageReply | None:
        if not self._carrier.connected_nodes:
            return None
        try:
            async with asyncio.timeout(USAGE_TIMEOUT_S):
                reply = await self._carrier.request(self._carrier.local_node, Usage())
        except (RacimoError, TimeoutError):
            return None
        assert isinstance(reply, UsageReply)
        return reply

    def _warnings(self, reply: UsageReply | None) -> list[str]:
        warnings = []
        if self._carrier.refusal is not None:
            warnings.append(f"the agent refuses this control process: {self._carrier.refusal.message}")
        elif reply is None:
            warnings.append("the node's agent does not answer")
        if self._loop.disk_full is not None:
            warnings.append(f"nothing can be written: {self._loop.disk_full.message}")
        return warnings + list(getattr(reply, "warnings", ()))

    async def _events(self, run: str, follow: bool) -> AsyncGenerator[Any, None]:
        seq = 0
        while True:
            pulse = self._loop.pulse(run)
            ended = self.core.state.runs[run].ended
            records = await self._loop.records(run, seq)
            if records:
                seq = records[-1].seq
                yield records
            if ended or not follow:
                break
            await pulse.wait()
        if self.core.state.runs[run].ended:
            yield EndedView(ended=self.core.state.runs[run].status)

    async def _progress_items(self, run: str, follow: bool) -> AsyncGenerator[RunProgress, None]:
        await self._board.refresh()
        if follow:
            last: RunProgress | None = None
            async with contextlib.aclosing(self._board.changes(self._loop, run)) as changes:
                async for _ in changes:
                    found = self.core.state.runs[run]
                    if found.ended:
                        break
                    view = self._run_progress(found)
                    if last is None or msgspec.structs.replace(view, cost=last.cost) != last:
                        last = view
                        yield view
        await self._board.recall([self.core.state.runs[run]])
        yield self._run_progress(self.core.state.runs[run])

    async def _exec_items(self, run: str, order: WorkerOrder) -> AsyncGenerator[Any, None]:
        try:
            exit_ = asyncio.ensure_future(await self._carrier.start_exec(self._carrier.local_node, order))
            async with contextlib.aclosing(self._logs.lines_of_exec(run, order.worker, exit_.done)) as several:
                async for lines in several:
                    yield lines
            async with asyncio.timeout(EXEC_EXIT_WAIT_S):
                yield ExecExitView(exit=await exit_)
        finally:
            await self._carrier.forget_exec(self._carrier.local_node, order.worker)
