"""A zygote: a single-threaded process with everything imported that forks workers on request.

`python -m racimo.agent.zygote HOME NAME PRELOAD FD` (FD gets a byte once it listens). It is the workers' parent,
outlives the agent, reaps each worker, ends what a worker leaves behind and writes its exit where the worker could
not. It never runs user code itself.
"""

import fcntl
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from racimo.agent import processes, shim
from racimo.agent.exits import EXIT_FILE, PID_FILE, exit_from_status, link_once, read_exit, write_exit
from racimo.agent.frames import FrameBuffer, FrameError, encode_frame, peer_uid
from racimo.agent.launch import (
    EXIT_HELD,
    ZYGOTE_PROTOCOL,
    Forked,
    ForkRefused,
    Launch,
    Reaped,
    Retire,
    Settle,
    Settled,
    ToZygote,
    ZygoteWelcome,
)
from racimo.agent.preload import PRELOADS, preload
from racimo.agent.private_folder import make_private_folder
from racimo.agent.verdict import name_failure, refuse_early_end
from racimo.spec.home import Home
from racimo.version import __version__

SEND_TIMEOUT_S = 2.0
ORPHAN_AFTER_S = 60.0
"""Without an agent and without workers for this long, a zygote ends by itself."""
MAX_CONNECTIONS = 16
RECEIVE_BYTES = 1 << 20
QUIET_AFTER_FORK_S = 5.0
"""Importing waits so long after a fork: the worker imports the same, and needs the processor more."""
ALREADY_STARTED_CODE = 120
"""How a fork ends that finds its worker started before: it does nothing."""

_DECODER = msgspec.msgpack.Decoder(ToZygote)


class _Child(msgspec.Struct, kw_only=True):
    """A worker of this zygote. `kills_before`: the kernel's count of memory kills when it was forked."""

    launch: Launch
    pid: int
    pidfd: int
    started_s: float
    kills_before: int


class Zygote:
    """The poll loop: a listening socket, connections of agents, and one pidfd per worker."""

    def __init__(self, listener: socket.socket, path: Path, lock_fd: int, later: Sequence[str] = ()) -> None:
        self._later = list(later)
        """Modules still to be imported, once no fork was asked for in a while."""
        self._quiet_s = 0.0
        self._listener: socket.socket | None = listener
        self._path = path
        self._lock_fd = lock_fd
        self._selector = selectors.DefaultSelector()
        self._buffers: dict[socket.socket, FrameBuffer] = {}
        self._children: dict[int, _Child] = {}
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Serves until retired (or orphaned) and without workers."""
        while self._children or (self._listener is not None):
            lonely = not self._buffers and not self._children
            wait_s = self._quiet_s if self._later else ORPHAN_AFTER_S if lonely else None
            ready = self._selector.select(wait_s)
            if not ready and self._later:
                self._quiet_s = 0.0
                _import_frozen([self._later.pop(0)])
            elif not ready and lonely:
                self._retire()
            for key, _ in ready:
                if key.data is not None:
                    self._reap(key.data)
                elif key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._receive(key.fileobj)

    def _accept(self) -> None:
        assert self._listener is not None
        connection, _ = self._listener.accept()
        if peer_uid(connection) not in (os.getuid(), 0) or len(self._buffers) >= MAX_CONNECTIONS:
            connection.close()
            return
        connection.settimeout(SEND_TIMEOUT_S)
        self._buffers[connection] = FrameBuffer()
        self._selector.register(connection, selectors.EVENT_READ)
        self._send(connection, ZygoteWelcome(pid=os.getpid(), protocol=ZYGOTE_PROTOCOL, version=__version__))

    def _receive(self, connection: socket.socket) -> None:
        if connection not in self._buffers:
            return
        try:
            piece = connection.recv(RECEIVE_BYTES)
            messages = [_DECODER.decode(body) for body in self._buffers[connection].feed(piece)]
        except (OSError, FrameError, msgspec.DecodeError) as error:
            print(f"zygote: dropped a connection: {error!r}", file=sys.stderr, flush=True)
            self._drop(connection)
            return
        if not piece:
            self._drop(connection)
            return
        for message in messages:
            if isinstance(message, Launch):
                self._fork(connection, message)
                self._quiet_s = QUIET_AFTER_FORK_S
            elif isinstance(message, Settle):
                self._settle(connection)
            elif isinstance(message, Retire):
                self._retire()

    def _drop(self, connection: socket.socket) -> None:
        if self._buffers.pop(connection, None) is not None:
            self._selector.unregister(connection)
            connection.close()

    def _send(self, connection: socket.socket, message: Any) -> None:
        try:
            connection.sendall(encode_frame(message))
        except OSError:
            # The agent is gone or stuck; it reads everything from disk when it comes back.
            self._drop(connection)

    def _settle(self, connection: socket.socket) -> None:
        for child in list(self._children.values()):
            if os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._reap(child)
        live = tuple(child.launch.worker for child in self._children.values())
        self._send(connection, Settled(live=live))

    def _retire(self) -> None:
        if self._listener is None:
            return
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = None
        self._path.unlink(missing_ok=True)
        os.close(self._lock_fd)

    def _fork(self, connection: socket.socket, launch: Launch) -> None:
        unfit = _unfit_to_fork()
        if unfit:
            self._send(connection, ForkRefused(worker=launch.worker, message=unfit))
            return
        started_s, kills_before = time.monotonic(), processes.oom_kills()
        pid = os.fork()
        if pid == 0:
            self._become_worker(launch, started_s)
        pidfd = os.pidfd_open(pid)
        ticks = processes.start_ticks(pid) or 0
        child = _Child(launch=launch, pid=pid, pidfd=pidfd, started_s=started_s, kills_before=kills_before)
        self._children[pid] = child
        self._selector.register(pidfd, selectors.EVENT_READ, child)
        self._send(connection, Forked(worker=launch.worker, pid=pid, start_ticks=ticks))

    def _become_worker(self, launch: Launch, started_s: float) -> NoReturn:
        code = 1
        try:
            os.setsid()
            self._close_all()
            _claim(launch, started_s)
            _redirect(Path(launch.directory))
            os.environ.clear()
            os.environ.update(launch.environment)
            os.chdir(launch.cwd)
            if launch.kind == "command":
                shim.main(launch)
            importlib.import_module("racimo.worker.bootstrap").main(launch)
        except BaseException:  # noqa: BLE001 - the last frame of a forked process: say it and leave, never return
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def _close_all(self) -> None:
        self._selector.close()
        for connection in self._buffers:
            connection.close()
        for child in self._children.values():
            os.close(child.pidfd)
        if self._listener is not None:
            self._listener.close()
            os.close(self._lock_fd)

    def _reap(self, child: _Child) -> None:
        """Ends what is left of the worker's processes while its zombie still holds the pid, then records the exit."""
        if self._children.get(child.pid) is not child:
            return
        processes.signal_group(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        del self._children[child.pid]
        processes.kill_children_except(set(self._children))
        exit = self._recorded_exit(child, status)
        if exit is not None:
            reaped = Reaped(worker=child.launch.worker, pid=child.pid, exit=exit)
            for connection in list(self._buffers):
                self._send(connection, reaped)

    def _recorded_exit(self, child: _Child, status: int) -> Any:
        """The worker's exit, written now if nobody has; None if another process is (or was) that worker."""
        directory = Path(child.launch.directory)
        record = processes.read_process_file(directory / PID_FILE)
        if record is not None and record.pid != child.pid:
            return None
        exit = read_exit(directory)
        if exit is None:
            exit = exit_from_status(status, time.monotonic() - child.started_s)
            if child.launch.kind != "command":
                exit = refuse_early_end(exit, directory, child.launch.worker, child.launch.rank)
            exit = name_failure(exit, directory, child.launch.host, processes.oom_kills() - child.kills_before)
            try:
                write_exit(directory, exit, Path(child.launch.ballast))
            except OSError as error:
                # The agent gets it by message and keeps trying; so say it and go on.
                print(f"zygote: cannot record the exit of {child.launch.worker}: {error}", file=sys.stderr, flush=True)
        return read_exit(directory) or exit


def _unfit_to_fork() -> str:
    """Why this process must not fork, or ""."""
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if num_threads != 1:
        return f"the zygote has {num_threads} threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the zygote has a CUDA context"
    return ""


def _claim(launch: Launch, started_s: float) -> None:
    """Makes this process *the* worker. An order that reached two zygotes, or came twice, runs once."""
    directory = Path(launch.directory)
    record = processes.record_of(os.getpid(), launch.worker, started_s)
    claimed = link_once(directory / PID_FILE, msgspec.json.encode(record), Path(launch.ballast))
    if not claimed or (directory / EXIT_FILE).exists():
        os._exit(ALREADY_STARTED_CODE)


def _redirect(directory: Path) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    sys.stdout.flush()
    sys.stderr.flush()
    for name, mode, number in ((os.devnull, os.O_RDONLY, 0), ("out.log", flags, 1), ("err.log", flags, 2)):
        fd = os.open(directory / name if number else name, mode, 0o600)
        os.dup2(fd, number)
        os.close(fd)


def _listen(path: Path) -> socket.socket:
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(draft))
    draft.chmod(0o600)
    listener.listen(MAX_CONNECTIONS)
    draft.replace(path)
    return listener


def main() -> None:
    """Listens first, imports then: an order that comes meanwhile waits in the socket."""
    home, name, modules, listening_fd = Home(Path(sys.argv[1])), sys.argv[2], PRELOADS[sys.argv[3]], int(sys.argv[4])
    path = home.zygote_socket(name)
    make_private_folder(path.parent)
    lock_fd = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"zygote: another {name} zygote of this home is alive", file=sys.stderr)
        sys.exit(EXIT_HELD)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = _listen(path)
    os.write(listening_fd, b"1")
    os.close(listening_fd)
    processes.set_child_subreaper()
    processes.write_process_file(home.processes_dir / f"zygote-{name}.json", f"zygote-{name}", time.monotonic())
    gc.disable()
    _import_frozen(modules.first)
    Zygote(listener, path, lock_fd, modules.later).run()


def _import_frozen(names: Sequence[str]) -> None:
    """What was imported is shared with all forks: a collector that touched it in one would copy it."""
    preload(names)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
