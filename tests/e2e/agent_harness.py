"""A real agent in a folder of its own, driven as the control process drives it."""

import asyncio
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from racimo.act.agent_client import AgentClient
from racimo.agent.processes import ProcessRecord, is_alive, pids_marked, read_process_file
from racimo.agent.protocol import (
    ControlHello,
    EventBatch,
    FileEntry,
    LogChunk,
    NumberedEvent,
    PullEvents,
    PutBlob,
    ReadLog,
    ReplyBody,
    RequestBody,
    Shutdown,
    StartReply,
    StartWorker,
    WorkerOrder,
)
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.state.events import WorkerExited, WorkerHung, WorkerStarted
from racimo.state.nouns import Exit, parse_worker_id
from racimo.version import PROTOCOL_VERSION

WAIT_S = 20.0
T = TypeVar("T")


class RealAgent:
    """Starts the daemon as the supervisor does. Events are remembered as they come."""

    def __init__(self, root: Path) -> None:
        self.home = Home(root)
        self.events: list[NumberedEvent] = []
        self._loop = asyncio.new_event_loop()
        self._client: AgentClient | None = None
        self._log = root.parent / f"{root.name}-agent.log"
        self.process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with open(self._log, "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "racimo.agent", "--home", str(self.home.root), "--slots", "4", "--price", "0"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(coroutine)

    @property
    def client(self) -> AgentClient:
        if self._client is None or self._client.closed.is_set():
            self._client = self.call(self._connect())
        return self._client

    async def _connect(self) -> AgentClient:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                hello = ControlHello(cluster="test", protocol=PROTOCOL_VERSION)
                return await AgentClient.connect(self.home.agent_socket, hello)
            except RacimoError:
                assert time.monotonic() < deadline and self.process.poll() is None, self._log.read_text()
                await asyncio.sleep(0.01)

    def request(self, body: RequestBody) -> ReplyBody:
        return self.call(self.client.request(body))

    def put(self, files: dict[str, str | bytes]) -> tuple[FileEntry, ...]:
        entries = []
        for path, text in files.items():
            content = text.encode() if isinstance(text, str) else text
            sha256 = hashlib.sha256(content).hexdigest()
            self.request(PutBlob(sha256=sha256, content=content))
            entries.append(FileEntry(path, 0o644, len(content), sha256))
        return tuple(entries)

    def start(self, order: WorkerOrder) -> None:
        reply = self.request(StartWorker(order=order))
        assert reply == StartReply(), reply

    def run(self, worker: str, *command: str, **fields: Any) -> None:
        self.start(WorkerOrder(worker=worker, kind="command", command=command, **fields))

    def train(self, worker: str, source: str, **fields: Any) -> None:
        files = self.put({"train.py": source})
        self.start(WorkerOrder(worker=worker, kind="train", train_file="train.py", files=files, **fields))

    def wait_for(self, accept: Callable[[Any], bool], timeout_s: float = WAIT_S) -> Any:
        """The first event, past or future, that `accept` takes."""
        position, deadline = 0, time.monotonic() + timeout_s
        while True:
            for numbered in self.events[position:]:
                if accept(numbered.event):
                    return numbered.event
            position = len(self.events)
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"not among {self.events}\n{self._log.read_text()}"
            after = self.events[-1].number if self.events else 0
            batch = self.request(PullEvents(after=after, wait_s=left_s))
            assert isinstance(batch, EventBatch)
            self.events.extend(batch.events)

    def _of(self, worker: str, kind: type) -> Callable[[Any], bool]:
        name = parse_worker_id(worker)
        return lambda event: isinstance(event, kind) and (event.run, event.attempt, event.index) == name

    def started(self, worker: str) -> int:
        return int(self.wait_for(self._of(worker, WorkerStarted)).pid)

    def exit(self, worker: str, timeout_s: float = WAIT_S) -> Exit:
        exit: Exit = self.wait_for(self._of(worker, WorkerExited), timeout_s).exit
        return exit

    def hung(self, worker: str) -> Any:
        return self.wait_for(self._of(worker, WorkerHung)).failure

    def log(self, worker: str, stream: Any = "out", **fields: Any) -> str:
        chunk = self.request(ReadLog(worker=worker, stream=stream, **fields))
        assert isinstance(chunk, LogChunk)
        return chunk.content.decode()

    def wait_for_line(self, worker: str, text: str = "") -> str:
        """Follows the worker's output until `text` is in it."""
        deadline, offset, found = time.monotonic() + WAIT_S, 0, ""
        while text not in found or not found:
            assert time.monotonic() < deadline, found
            chunk = self.request(ReadLog(worker=worker, offset=offset, wait_s=1.0))
            assert isinstance(chunk, LogChunk)
            found += chunk.content.decode()
            offset = chunk.offset + len(chunk.content)
            assert text in found or not chunk.ended, found + self.log(worker, "err")
        return found

    def record(self, role: str) -> ProcessRecord:
        record = read_process_file(self.home.processes_dir / f"{role}.json")
        assert record is not None
        return record

    def kill_agent(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """A new agent, as the supervisor starts it after the death of the old one."""
        self.process = self._spawn()
        self._client = None

    def leftovers(self, worker: str) -> list[int]:
        """Processes that still carry that worker's environment."""
        return pids_marked(b"RACIMO_WORKER", os.fsencode(self.home.worker_dir(worker) / "worker.json"))

    def close(self) -> None:
        if self.process.poll() is not None:
            self.restart()
        zygotes = [read_process_file(path) for path in self.home.processes_dir.glob("zygote-*.json")]
        self.request(Shutdown(grace_s=0.2))
        assert self.process.wait(10) == 0
        alive = [record for record in zygotes if record is not None and is_alive(record)]
        for record in alive:
            os.kill(record.pid, signal.SIGKILL)
        assert not alive, f"zygotes outlived the shutdown: {alive}"
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
        shutil.rmtree(self.home.root, ignore_errors=True)
