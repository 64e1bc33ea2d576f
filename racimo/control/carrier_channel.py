"""One node's agent as the control process sees it, across any number of connections: orders out, events in."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Protocol

from racimo.act.agent_client import AgentClient
from racimo.agent import protocol
from racimo.control.core import Core
from racimo.control.effects import Announce, Effect, Forget, Slice, Start, Stop
from racimo.spec.errors import RacimoError

PULL_WAIT_S = 30.0
REFUSED_PAUSE_S = 1.0
CONNECTION_WAIT_S = 5.0
"""How long a question for the agent waits for it to come back."""
BUSY_TRIES = 100
BUSY_PAUSE_S = 0.05
FIRST_PROMISE_S = 0.5

log = logging.getLogger("racimo.control.carrier")


class Hub(Protocol):
    """What a channel needs of the whole: facts go to the journal, orders and contents come from its stores."""

    async def until_written(self, change: Callable[[Core], object]) -> None: ...

    def connected(self, node: str) -> None: ...

    async def take(self, batch: protocol.EventBatch) -> None: ...

    async def order(self, start: Start) -> protocol.WorkerOrder | None: ...

    async def provide(self, node: str, missing: tuple[str, ...], run: str) -> None: ...

    async def could_not_start(self, worker: str, error: RacimoError) -> None: ...


class Channel:
    """`is_link`: over the network, so that the agent's beats are waited for; its own socket's end is sign enough."""

    def __init__(self, node: str, hub: Hub, *, quiet_since_s: float) -> None:
        self.node = node
        self.client: AgentClient | None = None
        self.is_link = False
        self.met = asyncio.Event()
        """The agent has said, in this process's life, what it knows of earlier runs."""
        self.connected = asyncio.Event()
        self.quiet_since_s = quiet_since_s
        """When it was heard last, or will count as such, while it is not connected (`time.monotonic`)."""
        self.promise_s = FIRST_PROMISE_S
        """It beats at least this often."""
        self.look_at_s = 0.0
        """When it may next turn out to be silent, kept by `Silence`."""
        self.waits: tuple[protocol.Wait, ...] = ()
        self.said_silent = False
        self._serving: asyncio.Task[None] | None = None
        self._hub = hub
        self._last: dict[str, asyncio.Task[None]] = {}

    # The connection

    async def serve(self, client: AgentClient, *, is_link: bool) -> None:
        """Works with this connection until it ends, instead of an earlier one."""
        while (earlier := self._serving) is not None:
            earlier.cancel()
            await asyncio.wait({earlier})
            if self._serving is earlier:
                self._serving = None
        self.client, self.is_link = client, is_link
        client.on_beat = self._note_beat
        self.said_silent = False
        self.look_at_s = 0.0
        self._serving = serving = asyncio.create_task(self._serve(client), name=f"channel {self.node}")
        self.connected.set()
        self._hub.connected(self.node)
        try:
            await asyncio.wait({serving})
        finally:
            serving.cancel()
            await asyncio.wait({serving})
            if self._serving is serving:
                self._serving = None
        if not serving.cancelled():
            serving.result()

    async def _serve(self, client: AgentClient) -> None:
        welcome = client.welcome

        def joined(core: Core) -> None:
            core.node_joined(welcome.node)
            core.node_knows(welcome.node.id, welcome.newest_run)
            core.resync(welcome.node.id, welcome.workers)

        try:
            await self._hub.until_written(joined)
            self.met.set()
            await self._pull_events(client)
        except RacimoError as error:
            if error.code != "unreachable":
                log.error("the agent of %s refused to send events: %s", self.node, error.message)
                await asyncio.sleep(REFUSED_PAUSE_S)
        finally:
            self.client = None
            self.connected.clear()
            client.abort()
            self.waits = ()
            self.promise_s = FIRST_PROMISE_S
            if not self.said_silent:
                self.look_at_s = 0.0
            self.quiet_since_s = time.monotonic()

    async def _pull_events(self, client: AgentClient) -> None:
        cursor = 0  # acknowledges nothing; the agent sends again what it has not got acknowledged
        while True:
            batch = await ask(client, protocol.PullEvents(after=cursor, wait_s=PULL_WAIT_S))
            assert isinstance(batch, protocol.EventBatch)
            if batch.events:
                await self._hub.take(batch)
                cursor = batch.events[-1].number

    def _note_beat(self, beat: protocol.Beat) -> None:
        self.waits = beat.waits
        if beat.next_s != self.promise_s:
            self.promise_s, self.look_at_s = beat.next_s, 0.0

    async def request(self, body: protocol.RequestBody) -> protocol.ReplyBody:
        """Asks the agent. `RacimoError`: its refusal, or `unreachable` if it is not there for `CONNECTION_WAIT_S`."""
        if self.client is None:
            try:
                async with asyncio.timeout(CONNECTION_WAIT_S):
                    await self.connected.wait()
            except TimeoutError:
                raise no_answer(self.node) from None
        if self.client is None:  # it came, and went before this task had its turn
            raise no_answer(self.node)
        return await ask(self.client, body)

    # Effects

    def carry(self, effect: Effect) -> None:
        """Begins to carry it out, in order for each worker. What the connection cuts off comes again by `resync`."""
        client = self.client
        if client is None:
            return
        match effect:
            case Start():
                self._after(effect.worker, self._start(client, effect))
            case Stop():
                self._after(effect.worker, self.tell(client, effect.message()))
            case Slice():
                self._after(effect.worker, self.tell(client, effect.message()))
            case Announce() | Forget():
                self._after(effect.run, self.tell(client, effect.message()))

    def _after(self, key: str, doing: Coroutine[None, None, None]) -> None:
        previous = self._last.get(key)
        task = asyncio.create_task(_in_turn(previous, doing), name=f"carry {key}")
        self._last[key] = task

        def done(task: asyncio.Task[None]) -> None:
            if self._last.get(key) is task:
                del self._last[key]
            if not task.cancelled() and task.exception() is not None:
                log.error("carrying out for %s failed", key, exc_info=task.exception())

        task.add_done_callback(done)

    async def tell(self, client: AgentClient, body: protocol.RequestBody) -> None:
        """A request whose answer does not matter; a refusal is logged."""
        try:
            await ask(client, body)
        except RacimoError as error:
            if error.code != "unreachable":
                log.warning("the agent of %s refused %s: %s", self.node, type(body).__name__, error.message)

    async def _start(self, client: AgentClient, start: Start) -> None:
        try:
            order = await self._hub.order(start)
            if order is None:
                return  # ended meanwhile
            reply = await ask(client, protocol.StartWorker(order=order))
            if isinstance(reply, protocol.StartReply) and reply.missing:
                await self._hub.provide(self.node, reply.missing, start.run)
                reply = await ask(client, protocol.StartWorker(order=order))
                if isinstance(reply, protocol.StartReply) and reply.missing:
                    raise RacimoError("internal", f"the agent still misses {len(reply.missing)} contents it was sent")
        except RacimoError as error:
            if error.code != "unreachable":
                await self._hub.could_not_start(start.worker, error)
        except OSError as error:
            problem = RacimoError(
                "file-missing", f"the run's files cannot be read: {error.strerror}", "submit it again"
            )
            await self._hub.could_not_start(start.worker, problem)


def no_answer(node: str) -> RacimoError:
    name = f"the agent of {node}" if node else "this machine's agent"
    return RacimoError("unreachable", f"{name} does not answer", "racimo nodes")


async def ask(client: AgentClient, body: protocol.RequestBody) -> protocol.ReplyBody:
    """A request that comes again while the agent has too many in flight."""
    for _ in range(BUSY_TRIES):
        try:
            return await client.request(body)
        except RacimoError as error:
            if error.code != "busy":
                raise
            await asyncio.sleep(BUSY_PAUSE_S)
    return await client.request(body)


async def _in_turn(previous: asyncio.Task[None] | None, doing: Coroutine[None, None, None]) -> None:
    if previous is not None:
        await asyncio.wait({previous})
    await doing
