"""A machine that came through Ray alone (its own `ray start`, KubeRay, an autoscaler) becomes a node of the cluster."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_stage import WAIT_S, free_cluster_port, wait_until

from racimo.act import guardian
from racimo.act.ray.family import Family
from racimo.act.ray_status import read_ray_status
from racimo.spec.home import Home

pytest.importorskip("ray")
pytestmark = pytest.mark.e2e


def cli(home: Home, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "racimo.cli.main", *words],
        env=guardian.clean_environment() | {"RACIMO_HOME": str(home.root)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a name short enough for Ray's sockets below it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def head(tmp_path: Path) -> Iterator[tuple[Home, int]]:
    home, port = Home(tmp_path / "head"), free_cluster_port()
    cli(home, "up", "--bind", f"127.0.77.1:{port}", "--carrier", "ray", "--slots", "1")
    yield home, port
    cli(home, "down")
    wait_until("nothing of Ray is left", lambda: not Family(home.root).members(), 10.0)


def test_a_node_that_came_through_ray_alone_gets_an_agent_that_outlives_its_ray(
    head: tuple[Home, int], tmp_path: Path, short: Path
) -> None:
    home, port = head
    other = Home(tmp_path / "other")
    wait_until("Ray is up", lambda: (status := read_ray_status(home)) and status.state == "up" and status.relays)
    token = str(home.node_dir / "ray" / "token")
    environment = guardian.clean_environment() | {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token, "RACIMO_HOME": str(other.root), "LEAK": "1",
    }  # fmt: skip
    command = ["--address", f"127.0.77.1:{port + 100}", "--node-ip-address", "127.0.77.3", "--num-cpus", "3",
               "--temp-dir", str(short), "--object-store-memory", "80000000", "--block"]  # fmt: skip
    with open(tmp_path / "ray.log", "wb") as log:
        started = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *command],
            env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        nodes: list[dict[str, object]] = []

        def joined() -> bool:
            nodes[:] = [view["node"] for view in json.loads(cli(home, "nodes", "-o", "json").stdout)]
            return any(str(node["id"]).startswith("ray-") and node.get("status", "up") == "up" for node in nodes)

        wait_until("it shows among the nodes", joined)
        node = next(node for node in nodes if str(node["id"]).startswith("ray-"))
        assert len(node["devices"]) == 3
        agent = int(json.loads((other.processes_dir / "agent.json").read_bytes())["pid"])
        variables = Path(f"/proc/{agent}/environ").read_bytes()
        assert b"LEAK=" not in variables
        assert b"RAY_" not in variables
        token_text = home.token_file.read_text().split(":")[0].encode()
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                assert token_text not in entry.read_bytes(), "the token stands in no list of processes"
            except (FileNotFoundError, ProcessLookupError):
                continue
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    assert guardian.start_ticks(agent) is not None
    cli(other, "down", "--now")
