"""The thread that carries everything between this worker and those on other machines.

It never holds the training up: the main thread posts packets and looks into inboxes, the thread moves bytes whenever
the network takes or brings some, also while a backward pass runs. A connection is abandoned at once by shutting it
down; from then on no byte of the memory behind it is sent.
"""

import contextlib
import errno
import os
import random
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from racimo.worker.children import close_in_children, drop
from racimo.worker.train.messages import Hello
from racimo.worker.train.stream import Broken, Channel

SLOW_BYTES_PER_S = 150e6
"""What is not urgent goes at most so fast on a connection..."""
SLOW_BESIDE_URGENT_BYTES_PER_S = 40e6
"""...and so fast while something urgent waits on any."""
MAX_STRANGERS = 64
"""Connections that have not yet said who they are; beyond it the oldest is dropped."""
STRANGER_S = 10.0
REDIAL_FIRST_S = 0.05
REDIAL_MOST_S = 1.0
DIAL_S = 3.0
"""An attempt to connect, until both sides are known, may take so long."""
_BACKLOG = 256


class Dial:
    """An address that is dialled until somebody who knows the key answers, or it is given up."""

    def __init__(self, place: tuple[str, int]) -> None:
        self.place = place
        self.channel: Channel | None = None
        """Once both sides are known."""
        self.failure = ""
        """Why the last attempt failed."""
        self._due_s = 0.0
        self._pause_s = REDIAL_FIRST_S
        self._trying: Channel | None = None
        self._until_s = 0.0


class Courier:
    """`wake_fd` is readable whenever something came in, or a connection came or went."""

    def __init__(self) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.key = b""
        self.failed: Exception | None = None
        self._arrivals: dict[tuple[int, str], Channel] = {}
        self._strangers: dict[Channel, float] = {}
        self._channels: set[Channel] = set()
        self._dials: set[Dial] = set()
        self._orders: deque[Callable[[], None]] = deque()
        self._poke_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._poke_fd, selectors.EVENT_READ)
        self._listeners: list[socket.socket] = []
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._ended = False
        # Whoever could still write to them holds this object: in a process that trains often they would run out.
        weakref.finalize(self, _close_fds, self.wake_fd, self._poke_fd).atexit = False

    # For the main thread (`listen` for any)

    def listen(self, address: str, ports: tuple[int, int], key: bytes) -> int:
        """Listens on a free port of the range, and returns it. Raises `OSError` if there is none."""
        self.key = key
        listener = _bind(address, ports)
        close_in_children(listener)
        listener.setblocking(False)
        self._order(lambda: self._open(listener))
        return int(listener.getsockname()[1])

    def close_listeners(self, *, but_newest: bool) -> None:
        """Nobody is told of them any more; connections that came through them live on."""

        def close() -> None:
            kept = self._listeners[-1:] if but_newest else []
            for listener in self._listeners:
                if listener not in kept:
                    self._selector.unregister(listener)
                    drop(listener)
            self._listeners = kept

        self._order(close)

    def dial(self, place: tuple[str, int]) -> Dial:
        dial = Dial(place)
        self._order(lambda: self._dials.add(dial))
        return dial

    def give_up(self, dial: Dial) -> None:
        def forget() -> None:
            self._dials.discard(dial)
            for channel in (dial._trying, dial.channel):
                if channel is not None:
                    self._drop(channel)

        self._order(forget)

    def take(self, generation: int, worker: str) -> Channel | None:
        """The newest connection of a peer that said it is of this generation."""
        return self._arrivals.pop((generation, worker), None)

    def forget_before(self, generation: int) -> None:
        for key in [key for key in list(self._arrivals) if key[0] < generation]:
            if (channel := self._arrivals.pop(key, None)) is not None:
                self.release(channel)

    def release(self, channel: Channel) -> None:
        """Ends a connection. What was handed to the kernel still arrives; nothing more is read from memory."""
        with contextlib.suppress(OSError):
            channel.socket.shutdown(socket.SHUT_RDWR)
        self._order(lambda: self._drop(channel))

    def go(self) -> None:
        """There is something to send."""
        os.eventfd_write(self._poke_fd, 1)

    def close(self) -> None:
        self._ended = True
        self.go()
        if self._thread is not None:
            self._thread.join()

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="racimo-courier", daemon=True)
                self._thread.start()
        self.go()

    # The thread

    def _serve(self) -> None:
        try:
            self._carry()
        except Exception as error:
            self.failed = error
            self._wake()
            raise

    def _carry(self) -> None:
        while not self._ended:
            while self._orders:
                self._orders.popleft()()
            now_s = time.monotonic()
            timeout_s = self._look_after(now_s)
            for key, mask in self._selector.select(timeout_s):
                if key.fileobj == self._poke_fd:
                    os.eventfd_read(self._poke_fd)
                elif isinstance(key.data, Channel):
                    self._serve_channel(key.data, mask)
                else:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
        for channel in list(self._channels):
            self._drop(channel)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                drop(key.fileobj)
        self._selector.close()

    def _look_after(self, now_s: float) -> float | None:
        """Starts what is due, sets what each connection is watched for, and returns the seconds until more is due."""
        due_s = [self._advance(dial, now_s) for dial in list(self._dials)]
        for channel, since_s in list(self._strangers.items()):
            if now_s > since_s + STRANGER_S or len(self._strangers) > MAX_STRANGERS:
                self._drop(channel)
        if self._strangers:
            due_s.append(min(self._strangers.values()) + STRANGER_S + 0.01)
        for channel in self._channels:
            if channel.wants_to_write(now_s):
                self._watch(channel, selectors.EVENT_READ | selectors.EVENT_WRITE)
            else:
                self._watch(channel, selectors.EVENT_READ)
                if channel.has_slow:
                    due_s.append(channel.slow_from_s)
        return max(min(due_s) - now_s, 0.0) if due_s else None

    def _watch(self, channel: Channel, mask: int) -> None:
        if self._selector.get_key(channel.socket).events != mask:
            self._selector.modify(channel.socket, mask, channel)

    def _serve_channel(self, channel: Channel, mask: int) -> None:
        if channel not in self._channels:
            return
        try:
            if mask & selectors.EVENT_READ:
                channel.read()
            if mask & selectors.EVENT_WRITE:
                urgent = any(other.has_urgent for other in self._channels)
                rate = SLOW_BESIDE_URGENT_BYTES_PER_S if urgent else SLOW_BYTES_PER_S
                had_urgent = channel.has_urgent
                channel.write(time.monotonic(), rate)
                if had_urgent and not channel.has_urgent:
                    self._wake()
        except (OSError, Broken) as error:
            # What it had said before stays in its inbox.
            channel.fail(error)
            self._drop(channel)
            self._wake()
            return
        if channel in self._strangers:
            self._introduce(channel)
        elif channel.inbox and mask & selectors.EVENT_READ:
            self._wake()

    def _introduce(self, channel: Channel) -> None:
        if not channel.inbox:
            return
        hello = channel.inbox[0][0]
        if not isinstance(hello, Hello):
            self._drop(channel)
            return
        del self._strangers[channel]
        if (older := self._arrivals.pop((hello.generation, hello.worker), None)) is not None:
            self._drop(older)
        self._arrivals[hello.generation, hello.worker] = channel
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self.wake_fd, 1)

    def _open(self, listener: socket.socket) -> None:
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # it gave up meanwhile
        channel = Channel(connection, self.key, dialed=False)
        self._strangers[channel] = time.monotonic()
        self._add(channel, selectors.EVENT_READ)

    def _add(self, channel: Channel, mask: int) -> None:
        self._channels.add(channel)
        self._selector.register(channel.socket, mask, channel)

    def _drop(self, channel: Channel) -> None:
        if channel not in self._channels:
            return
        self._channels.remove(channel)
        self._strangers.pop(channel, None)
        self._selector.unregister(channel.socket)
        channel.gone = True
        channel.close()

    def _advance(self, dial: Dial, now_s: float) -> float:
        """Moves an attempt to connect on; returns when to look again."""
        trying = dial._trying
        if trying is not None and trying.authentic and not trying.gone:
            dial.channel, dial._trying = trying, None
            self._dials.discard(dial)
            self._wake()
            return now_s + REDIAL_MOST_S
        if trying is not None and (trying.gone or now_s > dial._until_s):
            if not trying.gone:
                trying.fail(TimeoutError("it does not answer"))
                self._drop(trying)
            dial.failure, dial._trying = trying.why_gone, None
            dial._due_s = now_s + dial._pause_s
            dial._pause_s = min(2 * dial._pause_s, REDIAL_MOST_S)
            self._wake()
        if dial._trying is None and now_s >= dial._due_s:
            self._try(dial, now_s)
        return dial._until_s if dial._trying is not None else dial._due_s

    def _try(self, dial: Dial, now_s: float) -> None:
        dial._until_s = now_s + DIAL_S
        connection = socket.socket(socket.AF_INET6 if ":" in dial.place[0] else socket.AF_INET)
        dial._trying = Channel(connection, self.key, dialed=True)
        self._add(dial._trying, selectors.EVENT_READ | selectors.EVENT_WRITE)
        error = connection.connect_ex(dial.place)
        if error and error != errno.EINPROGRESS:
            dial._trying.fail(OSError(error, os.strerror(error)))
            self._drop(dial._trying)
            dial._until_s = now_s


def _bind(address: str, ports: tuple[int, int]) -> socket.socket:
    first, last = ports
    candidates = list(range(first, last + 1)) if first else [0]
    random.SystemRandom().shuffle(candidates)
    problem: OSError | None = None
    for port in candidates:
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(_BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            problem = error
            if error.errno != errno.EADDRINUSE:
                break
    raise problem or OSError(f"no ports from {first} to {last}")


def _close_fds(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
