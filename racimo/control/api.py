"""What each call of the API does. The table that names them is in `racimo.control.routes`."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable

import msgspec

from racimo.act.versions import own_versions
from racimo.agent.protocol import UsageReply, WorkerOrder
from racimo.control import node_calls, present, study_calls, usage
from racimo.control.awaiting import starting_reason
from racimo.control.bundle import MAX_BUNDLE_BYTES
from racimo.control.carrier import Carrier
from racimo.control.core import FIRST_EXEC_INDEX, Core
from racimo.control.examine import Examination
from racimo.control.exchange import Exchange, Streams
from racimo.control.log_lines import parse_positions
from racimo.control.log_source import LogSource
from racimo.control.log_streams import LogStreams
from racimo.control.loop import Loop
from racimo.control.mirror import Mirror
from racimo.control.outputs import Outputs
from racimo.control.progress import ProgressBoard
from racimo.control.reports import ReportBoard
from racimo.control.run_streams import RunStreams
from racimo.control.secrets import SecretStore
from racimo.control.snapshots import MAX_BLOB_BYTES, SnapshotStore
from racimo.control.views import (
    ClusterView,
    DownView,
    ExecRequest,
    FitRequest,
    OkView,
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
from racimo.state.nouns import Run, Worker, worker_id
from racimo.version import PROTOCOL_VERSION, __version__

MAX_LISTED_RUNS = 10_000
MAX_WAIT_S = 60.0
MAX_TAIL_LINES = 100_000
MAX_REPORTS = 1_000
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
        self._reports = ReportBoard(carrier, home.merged_reports_dir)
        self.mirror = Mirror(home, carrier, self._reports, lambda: loop.core.state)
        """Of other nodes' logs; whoever made this runs it."""
        self._logs = LogStreams(LogSource(carrier, loop, self.mirror.copies))
        self._outputs = Outputs(home, carrier, loop)
        self._of_run = RunStreams(loop, carrier, self._board, self._logs)
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
        here = self._carrier.local_node
        reply = (await usage.usage_of(self._carrier, [here])).get(here)
        runs = state.runs.values()
        num_up, num_devices, num_free = present.cluster_sums(state, self._carrier.connected_nodes)
        num_queued = sum(state.runs[run].status == "queued" for run in state.open_runs)
        view = ClusterView(
            id=self._cluster,
            version=__version__,
            protocol=PROTOCOL_VERSION,
            home=str(self._home.root),
            address=self._address,
            started_wall_s=self._started_wall_s,
            num_devices=num_devices,
            num_free=num_free,
            num_nodes=len(state.nodes),
            num_nodes_up=num_up,
            price_per_device_hour=present.price_of(state, here),
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
        state, here = self.core.state, self._carrier.local_node
        usages = await usage.usage_of(self._carrier, state.nodes)
        if here in usages:
            with_ours = usage.with_services(self._home.root, usages[here].processes)
            usages[here] = msgspec.structs.replace(usages[here], processes=with_ours)
        await exchange.answer(present.node_views(state, usages, self.core.clock.now_s(), self.core.absent))

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

    async def put_bundle(self, exchange: Exchange) -> None:
        async with contextlib.aclosing(exchange.body_parts(MAX_BUNDLE_BYTES)) as parts:
            bundle = b"".join([part async for part in parts])
        await asyncio.to_thread(self._snapshots.put_bundle, bundle)
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

    async def fit(self, exchange: Exchange) -> None:
        request = await exchange.read(FitRequest)
        await self._carrier.met()
        self.core.check_fit(request.spec)
        await exchange.answer(OkView())

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
        run = self._run(exchange)
        starting = await starting_reason(run, self.core.state.nodes, self._carrier)
        await exchange.answer(starting or self.core.why(run.id))

    # Trials

    async def trials(self, exchange: Exchange) -> None:
        await study_calls.trials(self._loop, exchange, self._run(exchange).id)

    async def change_study(self, exchange: Exchange) -> None:
        await study_calls.change(self._loop, exchange, self._run(exchange).id)

    # What runs leave and say

    async def outputs(self, exchange: Exchange) -> None:
        await exchange.answer(await self._outputs.listing(self._run(exchange), exchange.query.get("node", "")))

    async def output(self, exchange: Exchange) -> None:
        run, node = self._run(exchange), exchange.query.get("node", "")
        parts, size_bytes = await self._outputs.open(run, exchange.path["path"], node)
        await exchange.answer_file(parts, size_bytes)

    async def reports(self, exchange: Exchange) -> None:
        run = self._run(exchange)
        after = int(exchange.number("after", 0, 0, 2**53))
        await exchange.answer(await self._reports.read(run, after, MAX_REPORTS))

    async def logs(self, exchange: Exchange) -> None:
        run = self._run(exchange)
        lines = self._logs.of_run(
            run.id,
            follow=exchange.flag("follow"),
            worker=self._worker_named(run, exchange.query.get("worker", "")),
            tail=int(exchange.number("tail", 0, 0, MAX_TAIL_LINES)) if "tail" in exchange.query else None,
            begin=parse_positions(exchange.query.get("from", "")),
        )
        await self.streams.answer(exchange, lines)

    async def events(self, exchange: Exchange) -> None:
        await self.streams.answer(exchange, self._of_run.events(self._run(exchange).id, exchange.flag("follow")))

    async def progress(self, exchange: Exchange) -> None:
        await self.streams.answer(exchange, self._of_run.progress(self._run(exchange).id, exchange.flag("follow")))

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
            exec_of=worker_id(run.id, beside.attempt, beside.index),
        )
        await self.streams.answer(exchange, self._of_run.exec(beside.node, order))

    # Within

    def _run(self, exchange: Exchange) -> Run:
        return self.core.run(exchange.path["id"])

    def _view(self, run: Run, with_workers: bool) -> RunView:
        progress = self._of_run.progress_of(run) if self._board.of_run(run.id) else None
        return present.run_view(self.core, run, self._home, progress, with_workers, self._carrier.local_node)

    async def _learn_progress(self, runs: list[Run]) -> None:
        await self._board.refresh(runs)
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
            if spec.train_file:
                raise RacimoError("file-missing", f"{spec.train_file} was not sent: the spec names no snapshot")
            return
        files = self._snapshots.require_complete(spec.snapshot)
        for needed in filter(None, (spec.train_file, spec.study.proposer_file if spec.study is not None else "")):
            if all(file.path != needed for file in files):
                raise RacimoError("file-missing", f"{needed} is not among the {len(files)} files that were sent")

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

    def _live_worker(self, run: Run, name: str) -> Worker:
        live = {worker_id(run.id, w.attempt, w.index): w for w in run.live_workers if w.pid is not None}
        wanted = self._worker_named(run, name)
        if not live or (wanted and wanted not in live):
            what = wanted or f"a worker of {run.id} ({run.status})"
            raise RacimoError("wrong-state", f"{what} is not running", f"racimo show {run.id}")
        return live[wanted] if wanted else next(iter(live.values()))

    def _warnings(self, reply: UsageReply | None) -> list[str]:
        warnings = []
        if self._carrier.refusal is not None:
            warnings.append(f"the agent refuses this control process: {self._carrier.refusal.message}")
        elif reply is None:
            warnings.append("the agent of this machine does not answer")
        if self._loop.disk_full is not None:
            warnings.append(f"nothing can be written: {self._loop.disk_full.message}")
        return warnings + list(getattr(reply, "warnings", ()))
