"""A worker's connection to its agent, kept up by a thread: announcements in, readiness, progress and reports out.

The agent may die and come back at any time; training goes on meanwhile. What a dead agent may not have written down is
sent again: the newest readiness and progress always, and the last reports, which count once per step and name.
"""

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from racimo.agent.frames import FrameBuffer, FrameError, encode_frame
from racimo.agent.protocol import (
    CheckpointSaved,
    MessageToWorker,
    NewGeneration,
    PleaseLeave,
    PleasePause,
    Progress,
    Reachable,
    Ready,
    Report,
    RunSlice,
    SliceDone,
    WorkerContext,
    WorkerHello,
    WorkerMessage,
)
from racimo.worker.children import close_in_children, drop

PROGRESS_EVERY_S = 0.1
RECONNECT_FIRST_S = 0.05
RECONNECT_MOST_S = 1.0
MAX_OUTBOX = 10_000
"""Reports kept while no agent listens; beyond that the oldest are dropped."""
FULL_WAIT_S = 1.0
"""Who reports faster than an agent that listens takes it waits so long, at most, for room."""
RESENT_REPORTS = 4_096
BATCH_REPORTS = 512
"""Sent at a time: after each system call this thread may wait 5 ms for the interpreter's lock."""
FLUSH_S = 2.0
_READ_BYTES = 64 * 1024

Told = Report | CheckpointSaved | SliceDone
"""What is said once, in order, and again where an agent may not have written it down."""

_decode = msgspec.msgpack.Decoder(MessageToWorker).decode


class Link(Protocol):
    """What training needs of the world outside its peers."""

    wake_fd: int
    """Readable whenever something came in."""
    pause_requested: bool
    leave_requested: bool
    """The next generation, or the present one if it is without me, is that of the others."""
    expects_address: bool
    """Word of this machine's address on the network between nodes will come (`on_reachable`)."""

    def newest(self) -> NewGeneration | None: ...

    def clear_wake(self) -> None: ...

    def ready(self, message: Ready) -> None: ...

    def on_reachable(self, act: Callable[[Reachable], None]) -> None:
        """`act` is called, in whatever thread, for each address that this machine gets on the network between nodes;
        for the newest at once if there is one."""
        ...

    def progress(self, message: Progress) -> None: ...

    def tell(self, message: Told) -> None: ...

    def close(self) -> None: ...


class AgentLink:
    """The link of a worker of a cluster."""

    def __init__(self, context: WorkerContext) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.pause_requested = False
        self.leave_requested = False
        self.expects_address = context.reachable
        self._hello = WorkerHello(worker=context.worker, pid=os.getpid())
        self._path = context.agent_socket
        self.slice: RunSlice | None = None
        """The newest slice that this worker of a tune run was given."""
        self._newest: NewGeneration | None = None
        self._reachable: Reachable | None = None
        self._on_reachable: Callable[[Reachable], None] | None = None
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._connected = False
        self._ready: Ready | None = None
        self._progress: Progress | None = None
        self._last_progress: Progress | None = None
        self._outbox: deque[Told] = deque(maxlen=MAX_OUTBOX)
        self._sent: deque[Told] = deque(maxlen=RESENT_REPORTS)
        self._progress_at_s = 0.0
        self._hurry = False
        self._stop = threading.Event()
        self._idle = threading.Event()
        self._outgoing_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="racimo-link", daemon=True)
        self._thread.start()

    def newest(self) -> NewGeneration | None:
        return self._newest

    def clear_wake(self) -> None:
        _clear(self.wake_fd)

    def ready(self, message: Ready) -> None:
        with self._lock:
            self._ready = message
        self._go()

    def on_reachable(self, act: Callable[[Reachable], None]) -> None:
        with self._lock:
            self._on_reachable = act
            known = self._reachable
        if known is not None:
            act(known)

    def progress(self, message: Progress) -> None:
        """The newest one goes out, at most every `PROGRESS_EVERY_S`; the thread is woken no more often than that."""
        with self._lock:
            waking = self._progress is None
            self._progress = message
        if waking:
            self._go()

    def tell(self, message: Told) -> None:
        with self._lock:
            if len(self._outbox) >= MAX_OUTBOX and self._connected:
                self._room.wait_for(lambda: len(self._outbox) < MAX_OUTBOX or not self._connected, FULL_WAIT_S)
            waking = not self._outbox
            self._outbox.append(message)
        if waking:
            self._go()

    def close(self) -> None:
        """Sends what is left, for at most `FLUSH_S`, and ends the thread."""
        self._hurry = True
        os.eventfd_write(self._outgoing_fd, 1)
        self._idle.wait(FLUSH_S)
        self._stop.set()
        os.eventfd_write(self._outgoing_fd, 1)
        self._thread.join(FLUSH_S)

    def _go(self) -> None:
        self._idle.clear()
        os.eventfd_write(self._outgoing_fd, 1)

    # The thread

    def _serve(self) -> None:
        pause_s = RECONNECT_FIRST_S
        while not self._stop.is_set():
            connection = socket.socket(socket.AF_UNIX)
            close_in_children(connection)
            try:
                connection.connect(self._path)
                pause_s = RECONNECT_FIRST_S
                self._talk(connection)
            except (OSError, FrameError):
                # No agent at the moment: the supervisor starts it again, and it will be found at the same path.
                self._stop.wait(pause_s)
                pause_s = min(pause_s * 2, RECONNECT_MOST_S)
            finally:
                with self._lock:
                    self._connected = False
                    self._room.notify_all()
                drop(connection)

    def _talk(self, connection: socket.socket) -> None:
        with self._lock:
            announced = self._ready
            again = [announced, *self._sent] if announced is not None else [*self._sent]
            if self._progress is None:
                self._progress = self._last_progress
            self._connected = True
        _send(connection, self._hello, *again)
        frames = FrameBuffer()
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._outgoing_fd, selectors.EVENT_READ)
            while not self._stop.is_set():
                announced = self._flush(connection, announced)
                timeout_s = max(self._progress_wait_s(), 0.0) if self._progress is not None else None
                for key, _ in selector.select(timeout_s):
                    if key.fileobj is not connection:
                        _clear(self._outgoing_fd)
                        continue
                    content = connection.recv(_READ_BYTES)
                    if not content:
                        raise ConnectionResetError("the agent closed the connection")
                    for frame in frames.feed(content):
                        self._take(frame)

    def _flush(self, connection: socket.socket, announced: Ready | None) -> Ready | None:
        """Sends what is due, and returns the readiness that was sent last."""
        while True:
            messages: list[WorkerMessage] = []
            with self._lock:
                if self._ready is not announced:
                    announced = self._ready
                    messages += [announced] if announced is not None else []
                elif self._outbox:
                    told = [self._outbox.popleft() for _ in range(min(len(self._outbox), BATCH_REPORTS))]
                    self._sent.extend(told)
                    self._room.notify_all()
                    messages += told
                elif self._progress is not None and self._progress_wait_s() <= 0:
                    self._last_progress = self._progress
                    messages.append(self._progress)
                    self._progress = None
                    self._progress_at_s = time.monotonic()
                elif self._progress is None:
                    self._idle.set()
            if not messages:
                return announced
            _send(connection, *messages)

    def _progress_wait_s(self) -> float:
        """Until the newest progress may go out; at the end of the worker it may at once."""
        return 0.0 if self._hurry else self._progress_at_s + PROGRESS_EVERY_S - time.monotonic()

    def _take(self, frame: bytes) -> None:
        message = _decode(frame)
        if isinstance(message, NewGeneration):
            known = self._newest
            # The same number again: a member of it can be reached at another address meanwhile.
            moved = known is not None and message.number == known.number and message.members != known.members
            if known is None or message.number > known.number or moved:
                self._newest = message
        elif isinstance(message, PleasePause):
            self.pause_requested = True
        elif isinstance(message, Reachable):
            with self._lock:
                changed, self._reachable, act = message != self._reachable, message, self._on_reachable
            if changed and act is not None:
                act(message)
        elif isinstance(message, PleaseLeave):
            self.leave_requested = True
        elif isinstance(message, RunSlice):
            self.slice = message
        os.eventfd_write(self.wake_fd, 1)


class NoLink:
    """Outside a cluster: one generation with one member, and nobody to tell."""

    def __init__(self, generation: NewGeneration) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.pause_requested = False
        self.leave_requested = False
        self.expects_address = False
        self._generation = generation

    def newest(self) -> NewGeneration | None:
        return self._generation

    def clear_wake(self) -> None:
        _clear(self.wake_fd)

    def ready(self, message: Ready) -> None:
        pass

    def on_reachable(self, act: Callable[[Reachable], None]) -> None:
        pass

    def progress(self, message: Progress) -> None:
        pass

    def tell(self, message: Told) -> None:
        pass

    def close(self) -> None:
        os.close(self.wake_fd)


def _send(connection: socket.socket, *messages: WorkerMessage) -> None:
    connection.sendall(b"".join(map(encode_frame, messages)))


def _clear(fd: int) -> None:
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        pass
