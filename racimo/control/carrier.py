"""Makes it so on this machine: the connection to the agent's socket, effects out, events in."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine

import msgspec

from racimo.act.agent_client import AgentClient
from racimo.agent import protocol
from racimo.agent.pulse import Pulse
from racimo.control.core import FIRST_EXEC_INDEX, Core
from racimo.control.effects import Announce, Effect, Forget, Start, Stop
from racimo.control.loop import Loop
from racimo.control.modules import ModuleCheck
from racimo.control.redaction import Redactor
from racimo.control.secrets import SecretStore
from racimo.control.shipping import Shipping
from racimo.control.snapshots import SnapshotStore
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.state.events import WorkerExited, WorkerHung
from racimo.state.nouns import Exit, Failure, Node, parse_worker_id
from racimo.version import PROTOCOL_VERSION

PULL_WAIT_S = 30.0
RECONNECT_FIRST_S = 0.02
RECONNECT_MOST_S = 1.0
SILENT_AFTER_S = 2.0
"""How long an agent may be away (its supervisor starts it again in a fraction) before its node counts as silent."""
CONNECTION_WAIT_S = 5.0
"""How long a question for the agent waits for it to come back."""
DISK_FULL_PAUSE_S = 1.0
BUSY_TRIES = 100
BUSY_PAUSE_S = 0.05
SHUTDOWN_GRACE_S = 5.0
SHUTDOWN_MOST_S = 10.0

log = logging.getLogger("racimo.control.carrier")


class Carrier:
    """Effects to the agent and its events to the loop, across any number of connections."""

    def __init__(self, home: Home, cluster: str, secrets: SecretStore, snapshots: SnapshotStore) -> None:
        self._home = home
        self._cluster = cluster
        self._secrets = secrets
        self._snapshots = snapshots
        self._client: AgentClient | None = None
        self._connected = asyncio.Event()
        self._met = asyncio.Event()
        """Set once the agent has said, in this process's life, what it knows of earlier runs."""
        self._last: dict[str, asyncio.Task[None]] = {}
        self._exits: dict[str, asyncio.Future[Exit]] = {}
        self._given_secrets: dict[str, set[str]] = {}
        self.shipping = Shipping(snapshots, self.request, self._sources)
        self._modules = ModuleCheck(snapshots, self.request, self._node)
        self.loop: Loop
        self.local_node = ""
        """The node of this machine, once its agent has said who it is."""
        self.nodes_changed = Pulse()
        """Beats when a node's agent has connected or is gone."""
        self.refusal: RacimoError | None = None
        """Why the agent does not take this control process, such as another version."""

    @property
    def connected_nodes(self) -> frozenset[str]:
        """The nodes whose agents can be asked now."""
        return frozenset() if self._client is None else frozenset({self._client.welcome.node.id})

    def _node(self, name: str) -> Node | None:
        """The node if it can be asked now."""
        return self.loop.core.state.nodes.get(name) if name in self.connected_nodes else None

    def _sources(self) -> list[Node]:
        """Nodes that may pass contents on to others: all that can be asked now but the head's own."""
        local = "" if self._client is None else self._client.welcome.node.id
        found = [self._node(name) for name in self.connected_nodes - {local}]
        return [node for node in found if node is not None]

    async def run(self) -> None:
        """Connects again for ever, with bounded back-off."""
        delay_s = RECONNECT_FIRST_S
        silence = asyncio.create_task(self._say_silent())
        while True:
            try:
                client = await self._connect()
            except RacimoError as error:
                if error.code != "unreachable" and self.refusal is None:
                    log.error("the agent refuses: %s", error.message)
                self.refusal = None if error.code == "unreachable" else error
                await asyncio.sleep(delay_s)
                delay_s = min(RECONNECT_MOST_S, delay_s * 2)
                continue
            delay_s = RECONNECT_FIRST_S
            silence.cancel()
            self.refusal = None
            log.info("connected to the agent of node %s", client.welcome.node.id)
            try:
                await self._serve(client)
            finally:
                self._client = None
                self._connected.clear()
                self.nodes_changed.beat()
                silence = asyncio.create_task(self._say_silent())
                await client.close()
            log.warning("lost the agent")

    async def _connect(self) -> AgentClient:
        hello = protocol.ControlHello(cluster=self._cluster, protocol=PROTOCOL_VERSION)
        try:
            return await AgentClient.connect(self._home.agent_socket, hello)
        except msgspec.MsgspecError as error:
            raise RacimoError(
                "version-mismatch", f"the agent answers as another version would: {error}", "racimo down && racimo up"
            ) from error

    async def request(self, node: str, body: protocol.RequestBody) -> protocol.ReplyBody:
        """Asks a node's agent. `RacimoError`: its refusal, or `unreachable` if it is not there for
        `CONNECTION_WAIT_S`."""
        if self._client is None:
            try:
                async with asyncio.timeout(CONNECTION_WAIT_S):
                    await self._connected.wait()
            except TimeoutError:
                raise RacimoError("unreachable", f"the agent of {node} does not answer", "racimo check") from None
        assert self._client is not None
        if node not in ("", self._client.welcome.node.id):
            raise RacimoError("unreachable", f"the agent of {node} does not answer", "racimo nodes")
        return await _ask(self._client, body)

    async def met(self) -> None:
        """Waits (bounded) until the agent's word on earlier runs is in: no name is given twice. `RacimoError`."""
        try:
            async with asyncio.timeout(CONNECTION_WAIT_S):
                await self._met.wait()
        except TimeoutError:
            raise RacimoError("unreachable", "the node's agent does not answer", "racimo check") from None

    def redactor(self, run: str) -> Redactor:
        """Hides the present values of the secrets that a run names, and those it was started with."""
        found = self.loop.core.state.runs.get(run)
        names = found.spec.secrets if found is not None else ()
        return Redactor({*self._secrets.values(names).values(), *self._given_secrets.get(run, ())})

    # Effects

    def carry(self, effects: list[Effect]) -> None:
        """Begins to carry them out, in order for each worker. What the connection cuts off comes again by `resync`."""
        client = self._client
        if client is None:
            return
        for effect in effects:
            match effect:
                case Start():
                    self._after(effect.worker, self._start(client, effect))
                case Stop():
                    self._after(effect.worker, self._tell(client, effect.message()))
                case Announce() | Forget():
                    self._after(effect.run, self._tell(client, effect.message()))

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

    async def _tell(self, client: AgentClient, body: protocol.RequestBody) -> None:
        try:
            await _ask(client, body)
        except RacimoError as error:
            if error.code != "unreachable":
                log.warning("the agent refused %s: %s", type(body).__name__, error.message)

    async def _start(self, client: AgentClient, start: Start) -> None:
        try:
            order = await self._order(start)
            if order is None:
                return  # ended meanwhile
            await self._modules.require(self.loop.core.state.runs[start.run])
            reply = await _ask(client, protocol.StartWorker(order=order))
            if isinstance(reply, protocol.StartReply) and reply.missing:
                await self.shipping.provide(start.node, reply.missing)
                reply = await _ask(client, protocol.StartWorker(order=order))
                if isinstance(reply, protocol.StartReply) and reply.missing:
                    raise RacimoError("internal", f"the agent still misses {len(reply.missing)} contents it was sent")
        except RacimoError as error:
            if error.code != "unreachable":
                await self._could_not_start(start.worker, error)
        except OSError as error:
            problem = RacimoError(
                "file-missing", f"the run's files cannot be read: {error.strerror}", "submit it again"
            )
            await self._could_not_start(start.worker, problem)

    async def _order(self, start: Start) -> protocol.WorkerOrder | None:
        run = self.loop.core.state.runs[start.run]
        spec = run.spec
        self._secrets.require(spec.secrets)
        secrets = self._secrets.values(spec.secrets)
        if secrets:
            self._given_secrets.setdefault(run.id, set()).update(secrets.values())
        files = await asyncio.to_thread(self._snapshots.manifest, spec.snapshot) if spec.snapshot else ()
        worker = self.loop.core.state.worker(*parse_worker_id(start.worker))
        if worker is None or not worker.live:
            return None
        return self.loop.core.order_for(start.worker, files, secrets)

    async def _could_not_start(self, worker: str, error: RacimoError) -> None:
        log.warning("worker %s could not start: %s", worker, error.message)
        run, attempt, index = parse_worker_id(worker)
        failure = Failure(code=error.code, message=error.message, hint=error.hint, worker=worker)
        event = WorkerExited(run=run, attempt=attempt, index=index, exit=Exit(outcome="failed", failure=failure))
        await self._until_written(lambda core: core.agent_event(event))

    # Events

    async def _serve(self, client: AgentClient) -> None:
        welcome = client.welcome
        self._client = client
        self.local_node = welcome.node.id
        self._connected.set()
        self.nodes_changed.beat()

        def joined(core: Core) -> None:
            core.node_joined(welcome.node)
            core.node_knows(welcome.node.id, welcome.newest_run)
            core.resync(welcome.node.id, welcome.workers)

        try:
            await self._until_written(joined)
            self._met.set()
            cursor = 0  # acknowledges nothing; the agent sends again what it has not got acknowledged
            while True:
                batch = await _ask(client, protocol.PullEvents(after=cursor, wait_s=PULL_WAIT_S))
                assert isinstance(batch, protocol.EventBatch)
                if batch.events:
                    await self._take(batch)
                    cursor = batch.events[-1].number
        except RacimoError as error:
            if error.code != "unreachable":
                log.error("the agent refused to send events: %s", error.message)
                await asyncio.sleep(RECONNECT_MOST_S)

    async def _take(self, batch: protocol.EventBatch) -> None:
        events: list[protocol.AgentEvent] = []
        for numbered in batch.events:
            event = self._redacted(numbered.event)
            if event.index < FIRST_EXEC_INDEX:
                events.append(event)
            elif isinstance(event, WorkerExited):
                waiting = self._exits.get(f"{event.run}/{event.attempt}/{event.index}")
                if waiting is not None and not waiting.done():
                    waiting.set_result(event.exit)
        if events:
            await self._until_written(lambda core: [core.agent_event(event) for event in events])

    def _redacted(self, event: protocol.AgentEvent) -> protocol.AgentEvent:
        match event:
            case WorkerExited():
                failure = self.redactor(event.run).failure(event.exit.failure)
                return msgspec.structs.replace(event, exit=msgspec.structs.replace(event.exit, failure=failure))
            case WorkerHung():
                failure = self.redactor(event.run).failure(event.failure)
                return msgspec.structs.replace(event, failure=failure)
            case _:
                return event

    async def _until_written(self, change: Callable[[Core], object]) -> None:
        """Facts are known twice without harm, so they are simply told again until the journal has them."""
        while True:
            try:
                await self.loop.change(change)
            except RacimoError as error:
                if error.code not in ("disk-full", "busy"):
                    raise
                await asyncio.sleep(DISK_FULL_PAUSE_S)
                continue
            return

    async def _say_silent(self) -> None:
        await asyncio.sleep(SILENT_AFTER_S)
        for node in list(self.loop.core.state.nodes):
            await self._until_written(lambda core, node=node: core.node_silent(node))  # type: ignore[misc]

    # Exec and the end

    async def start_exec(self, node: str, order: protocol.WorkerOrder) -> Awaitable[Exit]:
        """Starts a command beside a worker on its node; what it returns waits for its exit. `forget_exec` after it."""
        waiting: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._exits[order.worker] = waiting
        await self.request(node, protocol.StartWorker(order=order))
        return waiting

    async def forget_exec(self, node: str, worker: str) -> None:
        waiting = self._exits.pop(worker, None)
        if waiting is not None and not waiting.done():
            client = self._client
            if client is not None and client.welcome.node.id == node:
                await self._tell(client, protocol.StopWorker(worker=worker, how="abort"))

    async def lost(self) -> None:
        """Returns when the agent is not there (any more)."""
        if self._client is not None:
            await self._client.closed.wait()

    async def shut_down(self) -> None:
        """Ends workers, zygotes and the agent; returns when it is gone, or could not be told within the bound."""
        client = self._client
        if client is None:
            log.warning("the agent is not there; the supervisor ends what it left")
            return
        try:
            async with asyncio.timeout(SHUTDOWN_MOST_S):
                await _ask(client, protocol.Shutdown(grace_s=SHUTDOWN_GRACE_S))
                await client.closed.wait()
        except TimeoutError:
            log.warning("the agent took longer than %g s to end", SHUTDOWN_MOST_S)
        except RacimoError as error:
            if error.code != "unreachable":
                log.warning("the agent refused to end: %s", error.message)


async def _ask(client: AgentClient, body: protocol.RequestBody) -> protocol.ReplyBody:
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
