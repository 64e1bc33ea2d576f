"""The agent's side of one zygote: starts it, connects to it, gives it orders, starts it again when it dies."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from racimo.agent.frames import FrameError, encode_frame, read_frame
from racimo.agent.launch import (
    EXIT_HELD,
    ZYGOTE_PROTOCOL,
    Forked,
    ForkRefused,
    FromZygote,
    Launch,
    Reaped,
    Retire,
    Settle,
    Settled,
    ToZygote,
    ZygoteWelcome,
)
from racimo.agent.processes import ProcessRecord, is_alive, open_pidfd, read_process_file
from racimo.agent.pulse import Pulse
from racimo.spec.home import Home
from racimo.version import __version__

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 30.0
MAX_FAILED_STARTS = 3
"""After this many in a row, orders that wait for the zygote fail instead of waiting on."""
HELD_WAIT_S = 60.0
"""How long another process may hold the place of the same name before that counts as a failure. It is a zygote that an
agent just killed had started and that does not listen yet, or a fork of one just killed that has not yet been scheduled
(it inherits the lock and closes it first thing): on a busy machine seconds, not more."""
MAX_LOG_BYTES = 1 << 20

# Imported single-threaded: a thread pool started before the fork would not exist in the children.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

_DECODER = msgspec.msgpack.Decoder(FromZygote)


class ZygoteLost(Exception):
    """The zygote died (or cannot start): whether it still took the order is told by the worker's pid file."""


class PlaceHeld(OSError):
    """Another zygote of the name is alive and does not listen: it is ending, or has just begun."""


class ZygoteKeeper:
    """Keeps one named zygote alive. `on_reaped(Reaped)` and `on_lost(workers)` tell the agent about its workers."""

    def __init__(
        self,
        home: Home,
        name: str,
        preload: str,
        python: str,
        on_reaped: Callable[[Reaped], None],
        on_lost: Callable[[frozenset[str]], None],
    ) -> None:
        self.name = name
        self.workers: set[str] = set()
        """Workers whose parent the connected zygote is."""
        self.ready = False
        self.failed_starts = 0
        self.last_error = ""
        self._home, self._preload, self._python = home, preload, python
        self._on_reaped, self._on_lost = on_reaped, on_lost
        self._changed = Pulse()
        self._writer: asyncio.StreamWriter | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._forks: dict[str, asyncio.Future[Forked]] = {}
        self.parted_workers: set[str] = set()
        """Workers of zygotes that were parted with."""
        self._parted: set[asyncio.Task[None]] = set()
        self._unfit = False
        self._closing = False
        self._num_waiting = 0
        self._task = asyncio.create_task(self._keep(), name=f"zygote-{name}")

    @property
    def idle(self) -> bool:
        """It has no workers and nobody waits for a fork."""
        return not self.workers and not self.parted_workers and not self._forks and not self._num_waiting

    @property
    def start_is_hopeless(self) -> bool:
        """It failed so often in a row that orders no longer wait for it."""
        return self.failed_starts >= MAX_FAILED_STARTS

    @property
    def is_of_earlier_agent(self) -> bool:
        """It lives and was not started here, so it may have workers that it has not told of yet."""
        return self._process is None and self.record is not None

    @property
    def record(self) -> ProcessRecord | None:
        """The zygote's process as its own file tells it, if it lives."""
        record = read_process_file(self._home.processes_dir / f"zygote-{self.name}.json")
        return record if record is not None and is_alive(record) else None

    @property
    def log_file(self) -> Path:
        return self._home.service_logs_dir / f"zygote-{self.name}.log"

    async def launch(self, launch: Launch) -> Forked:
        """Waits until the zygote is ready and has forked. `ZygoteLost` if it dies meanwhile or cannot start."""
        self._num_waiting += 1
        try:
            while not self.ready:
                if self._closing or self.start_is_hopeless:
                    raise ZygoteLost(f"the {self.name} zygote does not start: {self.last_error}")
                await self._changed.wait(MAX_BACKOFF_S)
        finally:
            self._num_waiting -= 1
        assert self._writer is not None
        fork: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._forks[launch.worker] = fork
        try:
            self._writer.write(encode_frame(launch))
            return await fork
        finally:
            self._forks.pop(launch.worker, None)

    async def settled(self, timeout_s: float) -> None:
        """Waits until it is ready or fails to become so, at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while not self.ready and (left_s := deadline_s - time.monotonic()) > 0:
            await self._changed.wait(left_s)

    async def close(self, *, end_zygote: bool) -> None:
        """Lets go of the zygote; with `end_zygote` it ends once it has no workers."""
        self._closing = True
        record = self.record
        if end_zygote and self.ready and self._writer is not None:
            self._writer.write(encode_frame(Retire()))
            await self._writer.drain()
        elif end_zygote and record is not None:
            os.kill(record.pid, 15)  # still importing: it has no workers yet
        if end_zygote and record is not None:
            await _wait_for_end(record, timeout_s=5.0)
        for task in (self._task, *self._parted):
            task.cancel()
        await asyncio.gather(self._task, *self._parted, return_exceptions=True)

    async def _keep(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        held_since_s: float | None = None
        while not self._closing:
            started_s = time.monotonic()
            held = False
            try:
                await self._serve()
                self.last_error = self.last_error or "it ended"
            except PlaceHeld as error:
                self.last_error = str(error)
                held_since_s = held_since_s or started_s
                held = started_s - held_since_s < HELD_WAIT_S
            except (OSError, FrameError, msgspec.DecodeError) as error:
                self.last_error = str(error)
            was_ready = self.ready
            self._disconnected()
            if was_ready:
                held_since_s = None
            self.failed_starts = 0 if was_ready else self.failed_starts + (not held)
            self._changed.beat()
            if was_ready and time.monotonic() - started_s > MAX_BACKOFF_S:
                backoff_s = FIRST_BACKOFF_S
            if not self._closing:
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    async def _serve(self) -> None:
        """One connection, from finding or starting the zygote to its end."""
        reader = await self._connect()
        assert self._writer is not None
        body = await read_frame(reader)
        if body is None:
            self.last_error = self._last_log_line()
            return
        welcome = _DECODER.decode(body)
        assert isinstance(welcome, ZygoteWelcome)
        self._unfit = not self._fits(welcome)
        self._send(Settle())
        while not self._unfit and (body := await read_frame(reader)) is not None:
            self._handle(_DECODER.decode(body))
        if self._unfit:
            self._part_with(reader)

    def _fits(self, welcome: ZygoteWelcome) -> bool:
        """Whether it is of this version; one left by an earlier installation is not."""
        return (welcome.protocol, welcome.version) == (ZYGOTE_PROTOCOL, __version__)

    def _part_with(self, reader: asyncio.StreamReader) -> None:
        """Leaves the zygote to its workers: it gives up its socket at once, so another can start, and goes on telling
        their ends on this connection until the last."""
        assert self._writer is not None
        self._send(Retire())
        parted = asyncio.create_task(self._hear_out(reader, self._writer, self.workers), name=f"parted {self.name}")
        self._parted.add(parted)
        parted.add_done_callback(self._parted.discard)
        self._writer, self.workers = None, set()

    async def _hear_out(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, workers: set[str]) -> None:
        try:
            self.parted_workers |= workers
            while (body := await read_frame(reader)) is not None:
                message = _DECODER.decode(body)
                if isinstance(message, Settled):
                    workers.update(message.live)
                    self.parted_workers.update(message.live)
                elif isinstance(message, Reaped):
                    workers.discard(message.worker)
                    self.parted_workers.discard(message.worker)
                    self._on_reaped(message)
        finally:
            writer.close()
            self.parted_workers -= workers
            if workers:
                self._on_lost(frozenset(workers))

    async def _connect(self) -> asyncio.StreamReader:
        path = self._home.zygote_socket(self.name)
        try:
            reader, self._writer = await asyncio.open_unix_connection(path)
        except (FileNotFoundError, ConnectionRefusedError):
            await self._start()
            try:
                reader, self._writer = await asyncio.open_unix_connection(path)
            except (FileNotFoundError, ConnectionRefusedError) as error:
                raise await self._start_error() from error
        return reader

    async def _start_error(self) -> OSError:
        """Why the process that was just started does not listen."""
        assert self._process is not None
        code = await asyncio.to_thread(self._process.wait)  # it closed its pipe: it is at its end
        return PlaceHeld(self._last_log_line()) if code == EXIT_HELD else OSError(self._last_log_line())

    async def _start(self) -> None:
        """Starts the process and returns once it listens (long before it has imported everything)."""
        self.log_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.log_file.exists() and self.log_file.stat().st_size > MAX_LOG_BYTES:
            self.log_file.replace(self.log_file.with_suffix(".log.old"))
        listening_read, listening_write = os.pipe()
        try:
            with open(self.log_file, "ab") as log:
                self._process = subprocess.Popen(
                    [self._python, "-m", "racimo.agent.zygote", os.fspath(self._home.root), self.name, self._preload,
                     str(listening_write)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    pass_fds=(listening_write,), env=zygote_environment(os.environ), cwd=self._home.node_dir,
                )  # fmt: skip
        finally:
            os.close(listening_write)
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(listening_read, "rb")
        )
        try:
            await reader.read()  # one byte when it listens, then the end; or the end at once if it died
        finally:
            transport.close()

    def _handle(self, message: FromZygote) -> None:
        if isinstance(message, Settled):
            self.workers.update(message.live)
            self.ready = True
            self.failed_starts = 0
            self._changed.beat()
        elif isinstance(message, Forked):
            self.workers.add(message.worker)
            fork = self._forks.get(message.worker)
            if fork is not None and not fork.done():
                fork.set_result(message)
        elif isinstance(message, Reaped):
            self.workers.discard(message.worker)
            self._on_reaped(message)
        elif isinstance(message, ForkRefused):
            fork = self._forks.get(message.worker)
            if fork is not None and not fork.done():
                fork.set_exception(ZygoteLost(message.message))
            self._unfit = True

    def _send(self, message: ToZygote) -> None:
        assert self._writer is not None
        self._writer.write(encode_frame(message))

    def _disconnected(self) -> None:
        self.ready = False
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        lost, self.workers = frozenset(self.workers), set()
        for fork in self._forks.values():
            if not fork.done():
                fork.set_exception(ZygoteLost(f"the {self.name} zygote died: {self.last_error}"))
        if lost:
            self._on_lost(lost)

    def _last_log_line(self) -> str:
        try:
            lines = self.log_file.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return "it wrote nothing"
        return lines[-1] if lines else "it wrote nothing"


def zygote_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """A clean environment: nothing of this cluster or another tool that could start threads or change imports."""
    dropped = ("RACIMO_", "RAY_", "TORCH", "PYTHONUNBUFFERED")
    kept = {key: value for key, value in environment.items() if not key.startswith(dropped)}
    return {**kept, **_ONE_THREAD}


async def _wait_for_end(record: ProcessRecord, timeout_s: float) -> bool:
    """True once that process has ended; it is killed after `timeout_s`."""
    pidfd = open_pidfd(record)
    if pidfd is None:
        return True
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ended.wait()
        return True
    except TimeoutError:
        os.kill(record.pid, 9)
        return False
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def default_python() -> str:
    """The interpreter of zygotes without an environment of their own."""
    return sys.executable
