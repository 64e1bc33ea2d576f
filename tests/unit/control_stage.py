"""The control process in one piece without its processes: real core, loop, carrier and API; the agent is a fake that
speaks the protocol on a Unix socket and does what the test says."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from racimo.act.journal import Journal, MemoryJournal
from racimo.agent import protocol
from racimo.agent.frames import encode_frame, read_frame
from racimo.control.api import Api
from racimo.control.carrier import Carrier
from racimo.control.clock import ClusterClock
from racimo.control.core import Core
from racimo.control.gate import Gate
from racimo.control.loop import Loop
from racimo.control.routes import Dispatcher
from racimo.control.secrets import SecretStore
from racimo.control.snapshots import SnapshotStore
from racimo.spec.home import Home
from racimo.spec.run import RunSpec
from racimo.state.events import WorkerExited, WorkerStarted
from racimo.state.nouns import Device, Exit, Node, parse_worker_id
from racimo.version import PROTOCOL_VERSION

TOKEN = "a-token-of-this-test"
HEADERS = {"Authorization": f"Bearer {TOKEN}", "Racimo-Protocol": str(PROTOCOL_VERSION)}
WAIT_S = 10.0


class FakeAgent:
    """Keeps what it was told; its workers do nothing until `exited` is called."""

    def __init__(self, home: Home, num_slots: int = 2) -> None:
        self.home = home
        self.node = Node(id="n1", host="here", devices=tuple(Device(index) for index in range(num_slots)))
        self.orders: list[protocol.WorkerOrder] = []
        self.told: list[Any] = []
        self.blobs: dict[str, bytes] = {}
        self.logs: dict[tuple[str, str], bytes] = {}
        self.written: list[protocol.LogPiece] = []
        """What was printed, in order: a cursor of `PullLogs` counts these."""
        self.outputs: dict[str, bytes] = {}
        self.progress: list[protocol.Progress] = []
        self.reports: list[protocol.Report] = []
        self.free_memory_bytes = 1
        self.live: dict[str, int] = {}
        self.ended: set[str] = set()
        self.acknowledged = 0
        self.refuse_start: protocol.Refused | None = None
        self.script: dict[tuple[str, ...], bytes] = {}
        """What a command prints; it then ends with exit code 0."""
        self._spool: list[protocol.NumberedEvent] = []
        self._numbers = itertools.count(1)
        self._news = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self) -> None:
        self.home.agent_socket.parent.mkdir(parents=True, exist_ok=True)
        self.home.agent_socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self.home.agent_socket)

    async def die(self) -> None:
        """The connection ends and nobody answers; workers and spool stay."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.close()
        self.home.agent_socket.unlink(missing_ok=True)

    def emit(self, event: protocol.AgentEvent) -> None:
        self._spool.append(protocol.NumberedEvent(next(self._numbers), event))
        self._pulse()

    def print(self, worker: str, content: bytes, stream: str = "out") -> None:
        before = self.logs.get((worker, stream), b"")
        self.written.append(protocol.LogPiece(worker=worker, stream=stream, offset=len(before), content=content))  # type: ignore[arg-type]
        self.logs[worker, stream] = before + content
        self._pulse()

    def exited(self, worker: str, code: int = 0, **how: Any) -> None:
        run, attempt, index = parse_worker_id(worker)
        self.live.pop(worker, None)
        self.ended.add(worker)
        ending = Exit(outcome="failed" if code else "finished", code=code, held_s=1.0, **how)
        self.emit(WorkerExited(run=run, attempt=attempt, index=index, exit=ending))

    def _pulse(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        assert await read_frame(reader) is not None
        states = [protocol.WorkerState(worker=name, pid=pid, exited=False) for name, pid in self.live.items()]
        states += [protocol.WorkerState(worker=name, pid=1, exited=True) for name in self.ended]
        writer.write(encode_frame(protocol.ControlWelcome(node=self.node, instance="1", workers=tuple(states))))
        tasks = set()
        while (body := await read_frame(reader)) is not None:
            request = msgspec.msgpack.decode(body, type=protocol.Request)
            task = asyncio.create_task(self._answer(request, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        for task in tasks:
            task.cancel()
        self._writers.discard(writer)

    async def _answer(self, request: protocol.Request, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_frame(protocol.Reply(request.id, await self._do(request.body))))

    async def _do(self, body: protocol.RequestBody) -> protocol.ReplyBody:
        match body:
            case protocol.StartWorker():
                return self._start(body.order)
            case protocol.PutBlob():
                self.blobs[body.sha256] = body.content
                return protocol.Ok()
            case protocol.PullEvents():
                return await self._pull(body)
            case protocol.ReadLog():
                return await self._read_log(body)
            case protocol.PullProgress():
                return protocol.ProgressBatch(number=0, progress=tuple(self.progress))
            case protocol.ReadReports():
                chosen = tuple(self.reports[body.after : body.after + body.limit])
                return protocol.ReportBatch(next=body.after + len(chosen), reports=chosen)
            case protocol.Usage():
                return protocol.UsageReply(processes=(), free_memory_bytes=self.free_memory_bytes, free_disk_bytes=2)
            case protocol.PullLogs():
                while body.after >= len(self.written):
                    await self._news.wait()
                pieces = tuple(self.written[body.after :])
                runs = {parse_worker_id(piece.worker)[0] for piece in pieces}
                return protocol.LogBatch(next=len(self.written), pieces=pieces, reported=tuple(runs))
            case protocol.ListOutputs():
                found = sorted(self.outputs.items())
                files = [protocol.OutputFile(path=n, size_bytes=len(c), modified_wall_s=1.0) for n, c in found]
                return protocol.OutputList(files=tuple(files))
            case protocol.ReadOutput():
                if body.path not in self.outputs:
                    return protocol.Refused(code="output-missing", message=f"there is no output {body.path!r}")
                content = self.outputs[body.path]
                part = content[body.offset : body.offset + body.limit]
                return protocol.OutputChunk(content=part, size_bytes=len(content))
            case protocol.StopWorker():
                self.told.append(body)
                if body.how in ("stop", "abort") and body.worker in self.live:
                    self.exited(body.worker, 143)
                return protocol.Ok()
            case _:
                self.told.append(body)
                return protocol.Ok()

    def _start(self, order: protocol.WorkerOrder) -> protocol.ReplyBody:
        if self.refuse_start is not None:
            return self.refuse_start
        missing = tuple({file.sha256 for file in order.files} - set(self.blobs))
        if missing:
            return protocol.StartReply(missing=missing)
        self.orders.append(order)
        if order.worker not in self.live and order.worker not in self.ended:
            run, attempt, index = parse_worker_id(order.worker)
            self.live[order.worker] = 1000 + len(self.orders)
            self.logs.setdefault((order.worker, "out"), b"")
            self.emit(WorkerStarted(run=run, attempt=attempt, index=index, pid=self.live[order.worker]))
            if order.command in self.script:
                self.print(order.worker, self.script[order.command])
                self.exited(order.worker)
        return protocol.StartReply()

    async def _pull(self, body: protocol.PullEvents) -> protocol.ReplyBody:
        self.acknowledged = max(self.acknowledged, body.after)
        while not (events := [one for one in self._spool if one.number > self.acknowledged]):
            await self._news.wait()
        return protocol.EventBatch(events=tuple(events))

    async def _read_log(self, body: protocol.ReadLog) -> protocol.ReplyBody:
        if not any(worker == body.worker for worker, _ in self.logs):
            return protocol.Refused(code="not-found", message="no such worker")
        while True:
            log = self.logs.get((body.worker, body.stream), b"")
            offset = max(0, len(log) + body.offset) if body.offset < 0 else body.offset
            content = log[offset : offset + body.limit]
            over = body.worker not in self.live
            if content or over or not body.wait_s:
                return protocol.LogChunk(
                    offset=offset, content=content, ended=over and offset + len(content) >= len(log)
                )
            await self._news.wait()


class Stage:
    def __init__(self, home: Home, agent: FakeAgent, journal: Journal) -> None:
        self.home = home
        self.agent = agent
        self.secrets = SecretStore(home.secrets_file)
        self.snapshots = SnapshotStore(home.blobs_dir, home.snapshots_dir)
        self.core = Core(journal, ClusterClock())
        self.carrier = Carrier(home, "cluster", self.secrets, self.snapshots)
        self.loop = Loop(self.core, self.carrier.carry)
        self.carrier.loop = self.loop
        self.shut_down = asyncio.Event()
        self.api = Api(
            home, "cluster", "http://127.0.0.1:1", self.loop, self.carrier, self.secrets, self.snapshots,
            self.shut_down.set,
        )  # fmt: skip
        self.app = Gate(Dispatcher(self.api), TOKEN)
        transport = httpx.ASGITransport(app=self.app)  # type: ignore[arg-type]
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1", headers=HEADERS)

    async def submit(self, *command: str, request: str = "", **fields: Any) -> dict[str, Any]:
        spec = msgspec.to_builtins(RunSpec(command=command, **fields))
        answer = await self.http.post("/v1/runs", json={"spec": spec, "request": request})
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    async def until(self, run: str, *statuses: str) -> dict[str, Any]:
        """The run once it has one of these statuses."""
        async with asyncio.timeout(WAIT_S):
            while True:
                pulse = self.loop.pulse(run)
                if self.core.state.runs[run].status in statuses:
                    return (await self.http.get(f"/v1/runs/{run}")).json()  # type: ignore[no-any-return]
                await pulse.wait()

    async def until_started(self, run: str) -> str:
        """The run's first live worker once it has a process."""
        async with asyncio.timeout(WAIT_S):
            while True:
                pulse = self.loop.pulse(run)
                for worker in self.core.state.runs[run].live_workers:
                    if worker.pid is not None:
                        return f"{run}/{worker.attempt}/{worker.index}"
                await pulse.wait()


@asynccontextmanager
async def stage(root: Path, journal: Journal | None = None, num_slots: int = 2) -> AsyncIterator[Stage]:
    home = Home(root)
    agent = FakeAgent(home, num_slots)
    await agent.listen()
    made = Stage(home, agent, journal or MemoryJournal())
    parts = [asyncio.create_task(made.loop.run()), asyncio.create_task(made.carrier.run())]
    try:
        async with asyncio.timeout(WAIT_S):
            while not made.core.state.nodes:
                await asyncio.sleep(0)
        yield made
        for part in parts:
            assert not part.done(), part
    finally:
        await made.http.aclose()
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        await agent.die()
