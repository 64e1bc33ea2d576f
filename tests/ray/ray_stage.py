"""A head and a node with a Ray part each, on loopback addresses of their own, driven through their files and pids."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from racimo.act import guardian
from racimo.act.ray.family import Family
from racimo.act.ray.place import is_free
from racimo.act.ray_status import RayStatus, read_ray_status
from racimo.act.tls import ensure_head_certificate
from racimo.spec.config import ClusterConfig, JoinConfig
from racimo.spec.home import Home

WAIT_S = 60.0
LOOK_S = 0.05


def wait_until(what: str, condition: Callable[[], object], most_s: float = WAIT_S) -> float:
    """Seconds until `condition` held."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < most_s, f"not within {most_s:g} s: {what}"
        time.sleep(LOOK_S)  # other processes' files and lives: no event to wait for
    return time.monotonic() - began_s


def free_cluster_port() -> int:
    """A port for a cluster whose block for Ray is free as well."""
    for port in range(20_000 + os.getpid() % 50 * 200, 32_000, 200):
        if all(is_free(port + offset) for offset in (0, *range(100, 200))):
            return port
    raise AssertionError("no 100 free ports in a row")


class Machine:
    """A home with an agent and a Ray part, as their supervisor would start them."""

    def __init__(self, root: Path, name: str, config: ClusterConfig, join: JoinConfig | None) -> None:
        self.home, self.name = Home(root), name
        self.home.node_dir.mkdir(parents=True)
        self.home.service_logs_dir.mkdir()
        (self.home.node_dir / "id").write_text(name)
        self.home.token_file.write_text("secret-of-the-cluster")
        self.home.config_file.write_bytes(msgspec.json.encode(config))
        if join is not None:
            self.home.join_file.write_bytes(msgspec.json.encode(join))
        self.services: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str) -> None:
        options = ["--slots", str(json.loads(self.home.config_file.read_bytes())["slots"])] if role == "agent" else []
        with open(self.home.service_logs_dir / f"{role}.log", "ab") as log:
            self.services[role] = subprocess.Popen(
                [sys.executable, "-P", "-m", {"agent": "racimo.agent", "ray": "racimo.act.ray"}[role], "--home",
                 str(self.home.root), *options],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env=guardian.clean_environment(),
            )  # fmt: skip

    def end(self, role: str, number: int = signal.SIGTERM) -> None:
        service = self.services.pop(role)
        service.send_signal(number)
        service.wait(WAIT_S)

    @property
    def status(self) -> RayStatus | None:
        return read_ray_status(self.home)

    def ray_processes(self) -> dict[int, str]:
        """Pid and the kernel's name of all that its Ray part has started."""
        found = {}
        for pid in Family(self.home.root).members():
            try:
                found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
            except FileNotFoundError:
                continue
        return found

    def pid_of(self, name: str) -> int | None:
        return next((pid for pid, found in self.ray_processes().items() if found == name), None)


class Stage:
    def __init__(self, root: Path, slots: tuple[int, int] = (2, 3)) -> None:
        port = free_cluster_port()
        self.cluster = f"127.0.77.1:{port}"
        self.ray_address = f"127.0.77.1:{port + 100}"
        config = ClusterConfig(slots=slots[0], bind=self.cluster, carrier="ray")
        self.head = Machine(root / "head", "head-1", config, None)
        ensure_head_certificate(self.head.home, self.cluster)
        join = JoinConfig(address=self.cluster, cluster="c-1", address_of_this_node="127.0.77.2", carrier="ray")
        self.node = Machine(root / "node", "node-2", ClusterConfig(slots=slots[1]), join)

    @property
    def machines(self) -> tuple[Machine, Machine]:
        return self.head, self.node

    def start(self) -> None:
        for machine in self.machines:
            machine.start("agent")
            machine.start("ray")
        wait_until("both relays are up", self.relays_up)

    def relays_up(self) -> bool:
        status = self.head.status
        return status is not None and status.state == "up" and status.relays == {"head-1": "up", "node-2": "up"}

    def python(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs a script as somebody who has the token of this cluster's Ray, or what `environment` says."""
        token = self.head.home.node_dir / "ray" / "token"
        known = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_ADDRESS": self.ray_address}
        return subprocess.run(
            [sys.executable, "-c", script], env=guardian.clean_environment() | known | environment,
            capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip

    def close(self) -> None:
        for machine in reversed(self.machines):
            for role in list(machine.services):
                machine.end(role)
            for path in machine.home.processes_dir.glob(
                "zygote-*.json"
            ):  # they outlive an agent; a supervisor ends them
                zygote = guardian.read_live(machine.home.root, path.stem)
                if zygote is not None:
                    os.kill(zygote.pid, signal.SIGKILL)
