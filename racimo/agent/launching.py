"""From an order to a launch: the worker's folders, its context file and its environment (torchrun's contract)."""

import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from racimo.agent.exits import BALLAST_FILE
from racimo.agent.interfaces import socket_variables
from racimo.agent.launch import Launch
from racimo.agent.protocol import WorkerContext, WorkerOrder
from racimo.agent.whole_file import write_whole
from racimo.spec.home import Home
from racimo.state.nouns import Node, parse_worker_id


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where the workers of an attempt meet (MASTER_ADDR and MASTER_PORT), and by which network interface; "": any."""

    address: str = "127.0.0.1"
    port: int
    interface: str = ""


ORDER_FILE, CONTEXT_FILE = "order.json", "worker.json"
FIRST_PORT, NUM_PORTS = 20_000, 12_000
"""Below the kernel's range for outgoing connections, so nobody gets our MASTER_PORT by chance."""


def choose_port(key: str, taken: set[int]) -> int:
    """A free TCP port on loopback for one rendezvous; the same key starts looking at the same place."""
    start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big")
    for step in range(NUM_PORTS):
        port = FIRST_PORT + (start + step) % NUM_PORTS
        if port in taken:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(98, f"no free port between {FIRST_PORT} and {FIRST_PORT + NUM_PORTS}")


def write_order(directory: Path, order: WorkerOrder) -> None:
    """Keeps the order, without its secrets, for the agent that comes after this one."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(directory / ORDER_FILE, msgspec.json.encode(msgspec.structs.replace(order, secrets={})))


def read_order(directory: Path) -> WorkerOrder:
    return msgspec.json.decode((directory / ORDER_FILE).read_bytes(), type=WorkerOrder)


def prepare_launch(
    home: Home, node: Node, order: WorkerOrder, beside: WorkerOrder | None, bin_dir: Path, rendezvous: Rendezvous
) -> Launch:
    """Writes the context file and makes the launch. `beside` is the order of the worker that an `exec` runs beside."""
    subject = beside or order
    run, attempt, index = parse_worker_id(subject.worker)
    directory = home.worker_dir(order.worker)
    output_dir = home.output_dir(run)
    output_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    context = WorkerContext(
        worker=order.worker, run=run, attempt=attempt, index=index, rank=subject.rank, world_size=subject.world_size,
        least=subject.least, most=subject.most, seed=subject.seed, threads=subject.threads, devices=subject.devices,
        directory=os.fspath(directory), output_dir=os.fspath(output_dir), checkpoint=subject.checkpoint,
        agent_socket=os.fspath(home.agent_socket), node=node.id, host=node.host, reachable=bool(node.address),
    )  # fmt: skip
    write_whole(directory / CONTEXT_FILE, msgspec.json.encode(context))
    environment = {
        **_base_environment(home, bin_dir),
        **torchrun_environment(subject, rendezvous),
        "RACIMO_WORKER": os.fspath(directory / CONTEXT_FILE),
        "RACIMO_RUN": run,
        "RACIMO_ATTEMPT": str(attempt),
        "RACIMO_OUTPUT_DIR": os.fspath(output_dir),
        **_device_environment(node, subject),
        **subject.variables,
        **subject.secrets,
        **(order.variables | order.secrets),
    }
    return Launch(
        worker=order.worker,
        directory=os.fspath(directory),
        cwd=os.fspath(home.attempt_files_dir(run, attempt)),
        environment=environment,
        kind=order.kind if order.kind in ("train", "tune") else "command",
        command=order.command + (order.args if order.kind == "command" else ()),
        train_file=order.train_file,
        train_function=order.train_function,
        args=order.args,
        config=order.config,
        fresh=order.fresh,
        shares=order.shares,
        threads=order.threads,
        seed=order.seed,
        rank=order.rank,
        host=node.host,
        ballast=os.fspath(home.node_dir / BALLAST_FILE),
    )


def torchrun_environment(
    order: WorkerOrder, rendezvous: Rendezvous, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What torchrun gives its workers, and by which interface their collectives go if they are on several nodes.

    `environment` is the agent's own."""
    rank, size = str(order.rank), str(order.world_size)
    run, _, _ = parse_worker_id(order.worker)
    spans_nodes = order.local_rank is not None
    return {
        "RANK": rank,
        "LOCAL_RANK": str(order.local_rank) if spans_nodes else rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(order.local_world_size) if spans_nodes else size,
        "GROUP_RANK": str(order.group_rank),
        "GROUP_WORLD_SIZE": str(order.group_world_size),
        "NODE_RANK": str(order.group_rank),
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
        "TORCHELASTIC_RESTART_COUNT": str(order.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(order.max_restarts),
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "OMP_NUM_THREADS": str(order.threads),
        **(socket_variables(rendezvous.interface, environment) if rendezvous.interface else {}),
    }


def _base_environment(home: Home, bin_dir: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The agent's own environment without Racimo's internals; `python` is the cluster's (or the `env:`'s)."""
    kept = {key: value for key, value in environment.items() if not key.startswith(("RACIMO_", "RAY_"))}
    return {
        **kept,
        "PATH": f"{bin_dir}{os.pathsep}{environment.get('PATH', os.defpath)}",
        "VIRTUAL_ENV": os.fspath(bin_dir.parent),
        "PYTHONUNBUFFERED": environment.get("PYTHONUNBUFFERED", "1"),
        "RACIMO_HOME": os.fspath(home.root),
    }


def _device_environment(node: Node, order: WorkerOrder) -> dict[str, str]:
    if not any(device.kind == "cuda" for device in node.devices):
        return {}
    visible = ",".join(str(index) for index in order.devices)
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}
