"""Makes it so on every node: effects to the agents, their events to the journal.

The agent of this machine is reached over its Unix socket (the embedded carrier), those of others by the links that they
make (`racimo.control.link_door`). Both are a `Channel`, and everything about runs asks the channel of a worker's node.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from racimo.act.agent_client import AgentClient
from racimo.agent import protocol
from racimo.agent.pulse import Pulse
from racimo.control.carrier_channel import CONNECTION_WAIT_S, Channel, ask, no_answer
from racimo.control.carrier_silence import Silence
from racimo.control.core import FIRST_EXEC_INDEX, Core
from racimo.control.effects import Effect, Start
from racimo.control.hung import name_waiting
from racimo.control.loop import Loop
from racimo.control.modules import ModuleCheck
from racimo.control.redaction import Redactor
from racimo.control.secrets import SecretStore
from racimo.control.shipping import Shipping
from racimo.control.snapshots import SnapshotStore
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.state.events import WorkerExited, WorkerHung
from racimo.state.nouns import Exit, Failure, Node, parse_worker_id, worker_id
from racimo.version import PROTOCOL_VERSION

RECONNECT_FIRST_S = 0.02
RECONNECT_MOST_S = 1.0
START_GRACE_S = 1.0
GRACE_PER_NODE_S = 0.005
"""How much longer than usual nodes may be quiet after this process has begun: all of them dial at once."""
MEET_S = 5.0
"""How long after its beginning names of runs wait for what nodes know of earlier ones."""
DISK_FULL_PAUSE_S = 1.0
SHUTDOWN_GRACE_S = 5.0
SHUTDOWN_MOST_S = 10.0
ABORT_MOST_S = 3.0

log = logging.getLogger("racimo.control.carrier")


class Carrier:
    """All nodes' channels, and what they need of the whole (`carrier_channel.Hub`)."""

    def __init__(self, home: Home, cluster: str, secrets: SecretStore, snapshots: SnapshotStore) -> None:
        self._home = home
        self._cluster = cluster
        self._secrets = secrets
        self._snapshots = snapshots
        self._channels: dict[str, Channel] = {}
        self._began_s = time.monotonic()
        self._local_connected = asyncio.Event()
        self._exits: dict[str, asyncio.Future[Exit]] = {}
        self._given_secrets: dict[str, set[str]] = {}
        self.shipping = Shipping(snapshots, self.request, self._sources)
        self._modules = ModuleCheck(snapshots, self.request, self._node)
        self.loop: Loop
        self.local_node = _noted_id(home)
        """The node of this machine, as its agent noted it or says who it is; "" before the very first agent has."""
        self.nodes_changed = Pulse()
        """Beats when a node's agent has connected or is gone."""
        self.refusal: RacimoError | None = None
        """Why the agent of this machine does not take this control process, such as another version."""

    @property
    def connected_nodes(self) -> frozenset[str]:
        """The nodes whose agents can be asked now."""
        return frozenset(node for node, channel in self._channels.items() if channel.client is not None)

    def client_of(self, node: str) -> AgentClient | None:
        """The connection with a node's agent, if there is one now."""
        channel = self._channels.get(node)
        return None if channel is None else channel.client

    async def run(self) -> None:
        """Reaches this machine's agent, again for ever; links of others come by `serve_link`."""
        known = self.loop.core.state.nodes
        grace_s = START_GRACE_S + GRACE_PER_NODE_S * len(known)
        for node in known:
            self._channel(node).quiet_since_s = time.monotonic() + grace_s
        silence = Silence(self._channels, self.until_written, lambda: self.loop.core.state)
        watching = asyncio.create_task(silence.run(), name="silence")
        reaching = asyncio.create_task(self._reach_local(), name="local agent")
        try:
            await asyncio.wait({watching, reaching}, return_when=asyncio.FIRST_COMPLETED)
            for task in (watching, reaching):
                if task.done():
                    task.result()
        finally:
            watching.cancel()
            reaching.cancel()
            await asyncio.gather(watching, reaching, return_exceptions=True)

    async def _reach_local(self) -> None:
        delay_s = RECONNECT_FIRST_S
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
            self.refusal = None
            self.local_node = client.welcome.node.id
            channel = self._channel(self.local_node)
            self._local_connected.set()
            try:
                await self._serve(channel, client, is_link=False)
            finally:
                self._local_connected.clear()

    async def _connect(self) -> AgentClient:
        hello = protocol.ControlHello(cluster=self._cluster, protocol=PROTOCOL_VERSION)
        try:
            return await AgentClient.connect(self._home.agent_socket, hello)
        except msgspec.MsgspecError as error:
            raise RacimoError(
                "version-mismatch", f"the agent answers as another version would: {error}", "racimo down && racimo up"
            ) from error

    async def serve_link(self, client: AgentClient) -> None:
        """Works with the link that another machine's agent made, until it ends. A link of the same node from before
        gives way: who may take its place was settled by `link_door`."""
        await self._serve(self._channel(client.welcome.node.id), client, is_link=True)

    async def _serve(self, channel: Channel, client: AgentClient, *, is_link: bool) -> None:
        try:
            await channel.serve(client, is_link=is_link)
        finally:
            log.warning("lost the agent of node %s", channel.node)
            self.nodes_changed.beat()

    def _channel(self, node: str) -> Channel:
        channel = self._channels.get(node)
        if channel is None:
            channel = self._channels[node] = Channel(node, self, quiet_since_s=time.monotonic())
        return channel

    async def request(self, node: str, body: protocol.RequestBody) -> protocol.ReplyBody:
        """Asks a node's agent; "" is this machine's. `RacimoError`: its refusal, or `unreachable` if it is not there
        for `CONNECTION_WAIT_S`."""
        if not node and not self.local_node:
            try:
                async with asyncio.timeout(CONNECTION_WAIT_S):
                    await self._local_connected.wait()
            except TimeoutError:
                raise no_answer("") from None
        node = node or self.local_node
        if node != self.local_node and node not in self._channels and node not in self.loop.core.state.nodes:
            raise RacimoError("node-unknown", f"there is no node {node!r}", "racimo nodes")
        return await self._channel(node).request(body)

    async def met(self) -> None:
        """Waits (bounded) until the agents' word on earlier runs is in: no name is given twice. `RacimoError` if this
        machine's own does not come; others that stay away are not waited for beyond `MEET_S` after the beginning."""
        try:
            async with asyncio.timeout(CONNECTION_WAIT_S):
                await self._local_connected.wait()
                await self._channel(self.local_node).met.wait()
        except TimeoutError:
            raise no_answer("") from None
        left_s = self._began_s + MEET_S - time.monotonic()
        if left_s > 0:
            nodes = self.loop.core.state.nodes.values()
            away = [node.id for node in nodes if node.status == "up" and not self._channel(node.id).met.is_set()]
            try:
                async with asyncio.timeout(left_s):
                    for node in away:
                        await self._channel(node).met.wait()
            except TimeoutError:
                log.warning("runs get names before all nodes said which they know")

    def redactor(self, run: str) -> Redactor:
        """Hides the present values of the secrets that a run names, and those it was started with."""
        found = self.loop.core.state.runs.get(run)
        names = found.spec.secrets if found is not None else ()
        return Redactor({*self._secrets.values(names).values(), *self._given_secrets.get(run, ())})

    # Effects

    def carry(self, effects: list[Effect]) -> None:
        """Begins to carry them out. What a connection cuts off, or is not there for, comes again by `resync`."""
        for effect in effects:
            channel = self._channels.get(effect.node)
            if channel is not None:
                channel.carry(effect)

    async def order(self, start: Start) -> protocol.WorkerOrder | None:
        """The whole order; None if the worker has ended meanwhile. `RacimoError`, `OSError`."""
        run = self.loop.core.state.runs[start.run]
        spec = run.spec
        self._secrets.require(spec.secrets)
        secrets = self._secrets.values(spec.secrets)
        if secrets:
            self._given_secrets.setdefault(run.id, set()).update(secrets.values())
        files = await asyncio.to_thread(self._snapshots.manifest, spec.snapshot) if spec.snapshot else ()
        await self._modules.require(run)
        worker = self.loop.core.state.worker(*parse_worker_id(start.worker))
        if worker is None or not worker.live:
            return None
        return self.loop.core.order_for(start.worker, files, secrets)

    async def provide(self, node: str, missing: tuple[str, ...], run: str) -> None:
        """Contents of the run's snapshot to a node. `RacimoError`, `OSError`."""
        workers = self.loop.core.state.runs[run].live_workers
        await self.shipping.provide(node, missing, {worker.node for worker in workers if worker.pid is not None})

    def _node(self, name: str) -> Node | None:
        """The node, if it can be asked now."""
        return self.loop.core.state.nodes.get(name) if name in self.connected_nodes else None

    def _sources(self) -> Iterable[Node]:
        nodes = self.loop.core.state.nodes
        return [nodes[node] for node in self.connected_nodes - {self.local_node} if node in nodes]

    async def could_not_start(self, worker: str, error: RacimoError) -> None:
        log.warning("worker %s could not start: %s", worker, error.message)
        run, attempt, index = parse_worker_id(worker)
        failure = Failure(code=error.code, message=error.message, hint=error.hint, worker=worker)
        event = WorkerExited(run=run, attempt=attempt, index=index, exit=Exit(outcome="failed", failure=failure))
        await self.until_written(lambda core: core.agent_event(event))

    # Events

    async def take(self, batch: protocol.EventBatch) -> None:
        """Returns once they are in the journal; what belongs to an `exec` goes to whoever waits for it."""
        events: list[protocol.AgentEvent] = []
        for numbered in batch.events:
            event = self._redacted(numbered.event)
            if event.index < FIRST_EXEC_INDEX:
                events.append(event)
            elif isinstance(event, WorkerExited):
                waiting = self._exits.get(worker_id(event.run, event.attempt, event.index))
                if waiting is not None and not waiting.done():
                    waiting.set_result(event.exit)
        if events:
            await self.until_written(lambda core: [core.agent_event(event) for event in events])

    def _redacted(self, event: protocol.AgentEvent) -> protocol.AgentEvent:
        match event:
            case WorkerExited():
                failure = self.redactor(event.run).failure(event.exit.failure)
                return msgspec.structs.replace(event, exit=msgspec.structs.replace(event.exit, failure=failure))
            case WorkerHung():
                failure = self.redactor(event.run).failure(event.failure)
                run = self.loop.core.state.runs.get(event.run)
                if run is not None and failure is not None:
                    waits = [wait for channel in self._channels.values() for wait in channel.waits]
                    failure = name_waiting(failure, run, waits)
                return msgspec.structs.replace(event, failure=failure)
            case _:
                return event

    def connected(self, node: str) -> None:
        log.info("connected to the agent of node %s", node)
        self.nodes_changed.beat()

    async def until_written(self, change: Callable[[Core], object]) -> None:
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

    # Exec and the end

    async def start_exec(self, node: str, order: protocol.WorkerOrder) -> Awaitable[Exit]:
        """Starts a command beside a worker on its node; what it returns waits for its exit. `forget_exec` after it."""
        waiting: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._exits[order.worker] = waiting
        await self.request(node, protocol.StartWorker(order=order))
        return waiting

    async def forget_exec(self, node: str, worker: str) -> None:
        waiting = self._exits.pop(worker, None)
        channel = self._channels.get(node)
        if waiting is not None and not waiting.done() and channel is not None and channel.client is not None:
            await channel.tell(channel.client, protocol.StopWorker(worker=worker, how="abort"))

    async def lost(self) -> None:
        """Returns when this machine's agent is not there (any more)."""
        client = self.client_of(self.local_node)
        if client is not None:
            await client.closed.wait()

    async def shut_down(self) -> None:
        """Ends workers everywhere, and this machine's zygotes and agent; returns when that is gone, or could not be
        told within the bound. Agents of other machines stay and dial until `racimo down` there."""
        try:
            async with asyncio.timeout(ABORT_MOST_S):
                await asyncio.gather(*self._abort_others())
        except TimeoutError:
            log.warning("not every node could be told within %g s", ABORT_MOST_S)
        client = self.client_of(self.local_node)
        if client is None:
            log.warning("the agent is not there; the supervisor ends what it left")
            return
        try:
            async with asyncio.timeout(SHUTDOWN_MOST_S):
                await ask(client, protocol.Shutdown(grace_s=SHUTDOWN_GRACE_S))
                await client.closed.wait()
        except TimeoutError:
            log.warning("the agent took longer than %g s to end", SHUTDOWN_MOST_S)
        except RacimoError as error:
            if error.code != "unreachable":
                log.warning("the agent refused to end: %s", error.message)

    def _abort_others(self) -> list[Awaitable[None]]:
        """What still lives on other nodes although it was asked to save or stop."""
        state = self.loop.core.state
        aborts: list[Awaitable[None]] = []
        for run in (state.runs[run] for run in state.open_runs):
            for worker in run.live_workers:
                channel = self._channels.get(worker.node)
                if channel is None or channel.client is None or worker.node == self.local_node:
                    continue
                name = worker_id(run.id, worker.attempt, worker.index)
                aborts.append(channel.tell(channel.client, protocol.StopWorker(worker=name, how="abort")))
        return aborts


def _noted_id(home: Home) -> str:
    try:
        return (home.node_dir / "id").read_text().strip()
    except FileNotFoundError:
        return ""
