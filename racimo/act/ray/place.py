"""What this machine's Ray part is to be, by what its home says: addresses, ports, command lines, environment.

Ports: with the cluster at port P, Ray's head listens at P+100, and each machine takes a block of `BLOCK_PORTS` above it
(the first that is free, kept across restarts), all of them at most P+199.
"""

import hashlib
import hmac
import json
import os
import socket
import sys
import zlib
from pathlib import Path

import msgspec

from racimo.act import guardian
from racimo.act.ray_status import RayPort
from racimo.agent.whole_file import write_whole
from racimo.spec.config import join_address, parse_address, parse_token, read_config, read_join
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.state.nouns import Device, Node

RAY_PORT_OFFSET = 100
BLOCK_PORTS = 24
BLOCKS = 4
SERVICE_PORTS = (
    "node-manager", "object-manager", "runtime-env-agent", "dashboard-agent-listen", "dashboard-agent-grpc",
    "metrics-export",
)  # fmt: skip
"""The first ports of a block, named as the options of `ray start`; workers of Ray get the rest."""
_LISTENING = {
    "node-manager": "Ray's node service",
    "object-manager": "Ray's transfer of objects",
    "runtime-env-agent": "Ray's environments",
}
OBJECT_STORE_BYTES = 80_000_000
"""The least that Ray takes. Nothing of ours goes through it."""
MAX_SESSION_PATH_BYTES = 40
"""Ray appends some 65 bytes to its folder for its sockets, whose paths hold 107."""
STARTED_FILE = "ray_current_cluster"
"""Written by `ray start` at its end."""
NODE_RESOURCE = "racimo_node_"
MARK_VARIABLE = "RACIMO_RAY"
"""In the environment of all that a Ray part starts: whose it is."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """`cluster` is the head's address of ours; its Ray is at `head_host` and `head_port`; `own_host` is this machine's
    IP."""

    is_head: bool
    cluster: str
    head_host: str
    head_port: int
    own_host: str

    @property
    def address(self) -> str:
        return join_address(self.head_host, self.head_port)


def ray_port(cluster_port: int) -> int:
    """The port of Ray at the head of a cluster at that port."""
    above = cluster_port + RAY_PORT_OFFSET
    return above if above + BLOCK_PORTS * BLOCKS < 65536 else cluster_port - 2 * RAY_PORT_OFFSET


def read_place(home: Home) -> Place:
    """`RacimoError` start-failed if the home does not say where the cluster is, or says it wrongly."""
    joined = read_join(home)
    cluster = read_config(home).bind if joined is None else joined.address
    if not cluster:
        raise RacimoError("start-failed", "this cluster has no address for other machines", "racimo up --bind ADDRESS")
    host, port = parse_address(cluster)
    head, towards_head = _addresses(host)
    own = head if joined is None else _for_ray(joined.address_of_this_node or towards_head)
    return Place(is_head=joined is None, cluster=cluster, head_host=head, head_port=ray_port(port), own_host=own)


def _addresses(host: str) -> tuple[str, str]:
    """The IP of that host, and the one that this machine shows to it (nothing is sent). `RacimoError` if there is no
    way to it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return _for_ray(str(address[0])), str(probe.getsockname()[0])
    except OSError as error:
        raise RacimoError("unreachable", f"there is no way from here to {host} ({error.strerror})") from error


def _for_ray(host: str) -> str:
    """Ray puts the address of some interface in the place of 127.0.0.1, and of no other one of this machine's own."""
    return "127.0.0.2" if host == "127.0.0.1" else host


def write_ray_token(home: Home) -> Path:
    """Makes the file with Ray's own token, which follows from the cluster's secret. `OSError`, `RacimoError`."""
    secret = parse_token(home.token_file.read_text()).secret
    token = hmac.new(secret.encode(), b"racimo ray", hashlib.sha256).hexdigest()
    path = folder(home) / "token"
    write_whole(path, token.encode())
    return path


def folder(home: Home) -> Path:
    """What the Ray part keeps: its token, its state (the head's), the output of its processes."""
    path = home.node_dir / "ray"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def session_folder(home: Home) -> Path:
    """Where Ray keeps sockets and logs: below the home, or below /tmp where that would be too long for a socket. Ray
    opens it to everybody, so the folder around it is ours alone."""
    path = folder(home) / "s"
    if len(os.fsencode(path)) <= MAX_SESSION_PATH_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(home.root)).hexdigest()[:12]
    return Path(f"/tmp/racimo-{os.getuid()}-{digest}") / "s"


def choose_block(home: Home, place: Place) -> int:
    """The first port of this machine's block. `RacimoError` start-failed if something else has ports of all blocks."""
    kept = folder(home) / "port"
    first, last = place.head_port + 1, place.head_port + BLOCK_PORTS * BLOCKS
    blocks = list(range(first, last, BLOCK_PORTS))
    try:
        wanted = int(kept.read_text())
    except (FileNotFoundError, ValueError):
        # Several homes of one machine that start at once had better not want the same.
        wanted = first if place.is_head else blocks[1 + zlib.crc32(os.fsencode(home.root)) % (BLOCKS - 1)]
    for block in sorted(blocks, key=lambda block: block != wanted):
        if all(is_free(port) for port in range(block, block + BLOCK_PORTS)):
            write_whole(kept, str(block).encode())
            return block
    raise RacimoError(
        "start-failed", f"Ray finds no free ports here: others have some in each quarter of {first}-{last}"
    )


def is_free(port: int) -> bool:
    """Whether this machine's TCP port can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def start_command(home: Home, place: Place, node: Node, block: int) -> list[str]:
    """The command that starts Ray here and ends with it."""
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    if place.is_head:
        # Its dashboard, its autoscaler and its reader of logs would be 250 MB that nothing here asks.
        command += ["--head", f"--port={place.head_port}", "--include-dashboard=false", "--no-monitor"]
    else:
        command += [f"--address={place.address}"]
    command += [f"--{name}-port={block + offset}" for offset, name in enumerate(SERVICE_PORTS)]
    workers = block + len(SERVICE_PORTS), block + BLOCK_PORTS - 1
    return [
        *command,
        f"--node-ip-address={place.own_host}",
        f"--min-worker-port={workers[0]}",
        f"--max-worker-port={workers[1]}",
        f"--temp-dir={session_folder(home)}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--include-log-monitor=false",
        *_resources(node.id, node.devices),
    ]


def _resources(node: str, devices: tuple[Device, ...]) -> list[str]:
    """The devices as Ray counts them; where there are accelerators, the machine's cores are accounted beside them."""
    accelerators = [device for device in devices if device.kind != "cpu"]
    cores = len(os.sched_getaffinity(0)) if accelerators else len(devices)
    own = json.dumps({NODE_RESOURCE + node: 1})
    return [f"--num-cpus={cores}", f"--num-gpus={len(accelerators)}", f"--resources={own}"]


def environment(home: Home, token: Path) -> dict[str, str]:
    """For everything that is Ray's here."""
    kept = {name: value for name, value in guardian.clean_environment().items() if not name.lower().endswith("_proxy")}
    return kept | {
        MARK_VARIABLE: os.fspath(home.root),
        "RACIMO_HOME": os.fspath(home.root),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": os.fspath(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # it would kill Ray's workers, ours among them
        "RAY_worker_niceness": "0",  # 15, and children inherit it
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # nothing to wait for: the relay holds no work
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": os.fspath(folder(home) / "state"),
        "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",  # how long a node's part waits for the head before it ends
        "RAY_ROTATION_MAX_BYTES": "2000000",
        "RAY_ROTATION_BACKUP_COUNT": "1",
    }


def ports(place: Place, block: int) -> tuple[RayPort, ...]:
    """What may listen, and where: seen at real starts, Ray binds only its environment agent to the address that it is
    given."""
    found = [RayPort(port=place.head_port, what="Ray's directory", everywhere=True)] if place.is_head else []
    for offset, option in enumerate(SERVICE_PORTS):
        if option in _LISTENING:
            everywhere = option != "runtime-env-agent"
            found.append(RayPort(port=block + offset, what=_LISTENING[option], everywhere=everywhere))
    workers = range(block + len(SERVICE_PORTS), block + BLOCK_PORTS)
    return (*found, *(RayPort(port=port, what="a worker of Ray", everywhere=True) for port in workers))
