"""The way of an order to a forked process: disk, environment, files, launch."""

import asyncio
from pathlib import Path

from racimo.agent.blobs import BlobStore
from racimo.agent.environments import Environment, EnvironmentFailed, Environments
from racimo.agent.exits import BALLAST_FILE
from racimo.agent.interfaces import interface_of, listens_already
from racimo.agent.launch import Forked
from racimo.agent.launching import Rendezvous, choose_port, prepare_launch
from racimo.agent.protocol import WorkerOrder
from racimo.agent.verdict import free_disk_bytes
from racimo.agent.whole_file import write_whole
from racimo.agent.zygote_keeper import ZygoteLost
from racimo.agent.zygotes import Zygotes
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.spec.quantity import format_size
from racimo.state.nouns import Failure, Node, parse_worker_id

MIN_FREE_DISK_BYTES = 64 * 2**20
"""With less than this nothing is started."""
BALLAST_BYTES = 4 * 2**20
MAX_LAUNCH_TRIES = 3
PORT_FILE = "master_port"


class StartFailed(Exception):
    """A worker that cannot start, with its `failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Starter:
    """Carries out orders. One attempt's files are unpacked once, whoever of its workers comes first."""

    def __init__(self, home: Home, node: Node, blobs: BlobStore, zygotes: Zygotes) -> None:
        self._home, self._node, self._blobs, self._zygotes = home, node, blobs, zygotes
        self.environments = Environments(home.node_dir / "envs", node.host)
        self._unpacking: dict[Path, asyncio.Task[None]] = {}
        self._ports: dict[str, int] = {}

    def set_node(self, node: Node) -> None:
        """The node as it is from now on: it has got an address."""
        self._node = node

    async def launch(self, order: WorkerOrder, beside: WorkerOrder | None) -> Forked:
        """Forks the worker. `StartFailed` with the reason, or `OSError`."""
        if order.exec_of and beside is None:
            raise StartFailed(Failure(code="run-unknown", message=f"there is no worker {order.exec_of} on this node"))
        self._check_disk()
        await self._unpack(beside or order)
        rendezvous = self._rendezvous(beside or order, serves=order.rank == 0 and not order.exec_of)
        environment = await self._environment(beside or order)
        launch = prepare_launch(self._home, self._node, order, beside, environment.bin_dir, rendezvous)
        for attempt in range(MAX_LAUNCH_TRIES):
            if order.kind in ("train", "tune"):
                keeper = self._zygotes.get("torch", environment.hash, environment.python)
            else:
                keeper = self._zygotes.get("plain")
            try:
                return await keeper.launch(launch)
            except ZygoteLost as error:
                if keeper.start_is_hopeless or attempt + 1 == MAX_LAUNCH_TRIES:
                    raise StartFailed(Failure(code="environment-failed", message=str(error))) from error
        raise AssertionError("unreachable")

    async def _environment(self, order: WorkerOrder) -> Environment:
        try:
            return await self.environments.get(order.requirements)
        except EnvironmentFailed as error:
            raise StartFailed(error.failure) from error

    def _check_disk(self) -> None:
        free = free_disk_bytes(self._home.node_dir)
        if free < MIN_FREE_DISK_BYTES:
            message = (
                f"{self._node.host} has {format_size(free)} free under {self._home.node_dir}; "
                f"a worker needs {format_size(MIN_FREE_DISK_BYTES)}"
            )
            raise StartFailed(Failure(code="disk-full", message=message, hint=f"df -h {self._home.node_dir}"))
        ballast = self._home.node_dir / BALLAST_FILE
        if not ballast.exists():
            ballast.write_bytes(bytes(BALLAST_BYTES))

    async def _unpack(self, order: WorkerOrder) -> None:
        run, attempt, _ = parse_worker_id(order.worker)
        target = self._home.attempt_files_dir(run, attempt)
        task = self._unpacking.get(target)
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(self._blobs.unpack, order.files, target))
            self._unpacking[target] = task
        try:
            await asyncio.shield(task)
        except RacimoError as error:
            raise StartFailed(Failure(code=error.code, message=error.message, hint=error.hint)) from error
        finally:
            if task.done():
                self._unpacking.pop(target, None)

    def _rendezvous(self, order: WorkerOrder, *, serves: bool) -> Rendezvous:
        """Where the attempt's workers meet: as ordered if they are on several nodes, else on loopback. `serves`: this
        worker will listen there. What cannot work is refused here, not found out by a time-out of all others."""
        if not order.master_address:
            return Rendezvous(port=self._port(order.rendezvous_key or order.worker))
        host, address, port = self._node.host, order.master_address, order.master_port
        own = self._node.address
        interface = interface_of(own) if own else ""
        if interface is None:
            raise StartFailed(
                Failure(
                    code="rendezvous-failed",
                    message=f"{host} is known to others as {own}, and none of its network interfaces has that address",
                    hint="racimo join with --address of an interface that the other machines reach",
                )
            )
        try:
            taken = serves and listens_already(address, port)
        except OSError as error:
            message = f"rank 0 is to be found at {address}:{port}, which {host} cannot offer: {error.strerror}"
            raise StartFailed(Failure(code="rendezvous-failed", message=message, hint="racimo nodes")) from error
        if taken:
            message = f"port {port} of {host} ({address}), where the attempt's workers are to meet, is taken"
            hint = f"ss -ltnp 'sport = :{port}'  # on {host}: who has it; the next attempt takes another port"
            raise StartFailed(Failure(code="rendezvous-failed", message=message, hint=hint))
        return Rendezvous(address=address, port=port, interface=interface)

    def _port(self, key: str) -> int:
        """One port per rendezvous, kept in a file so that the agent after this one gives the same."""
        if key not in self._ports:
            path = self._home.node_dir / "workers" / key / PORT_FILE
            if path.exists():
                self._ports[key] = int(path.read_text())
            else:
                self._ports[key] = choose_port(key, set(self._ports.values()))
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_whole(path, str(self._ports[key]).encode())
        return self._ports[key]

    def forget_run(self, run: str) -> None:
        """Frees the ports of a run's attempts."""
        for key in [key for key in self._ports if key.split("/")[0] == run]:
            del self._ports[key]
