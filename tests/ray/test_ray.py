"""Ray beneath a cluster: its accounts are true, whatever of it dies comes back, and nothing of ours dies with it."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_stage import Stage, wait_until

from racimo.act.ray.family import Family

pytest.importorskip("ray")
pytestmark = pytest.mark.e2e
CONNECT = "import json, ray; ray.init(log_to_driver=False, _node_ip_address='127.0.77.1')\n"
DEATH_NOTICED_S = 30.0
"""Ray looks for a dead node service for 15 s; then the relay is made again on the new one."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("ray"))
    try:
        stage.start()
        yield stage
    finally:
        stage.close()


def test_the_relays_hold_all_devices_in_the_accounts_of_ray(stage: Stage) -> None:
    done = stage.python(CONNECT + "print(json.dumps([ray.cluster_resources(), ray.available_resources()]))")
    assert done.returncode == 0, done.stderr
    there, free = json.loads(done.stdout)
    assert there["CPU"] == 5
    assert there["racimo_node_head-1"] == there["racimo_node_node-2"] == 1
    assert free.get("CPU", 0) == 0, "somebody else could use what the cluster's runs use"


@pytest.mark.parametrize("token", ["", "0" * 64])
def test_a_stranger_without_the_token_is_refused(stage: Stage, token: str, tmp_path: Path) -> None:
    own = tmp_path / "token"
    own.write_text(token)
    script = f"from ray._raylet import GcsClient; print(GcsClient({stage.ray_address!r}).get_all_node_info(timeout=5))"
    done = stage.python(script, RAY_AUTH_MODE="token" if token else "disabled", RAY_AUTH_TOKEN_PATH=str(own))
    assert done.returncode != 0
    assert "InvalidAuthToken" in done.stderr


def test_a_killed_relay_comes_back(stage: Stage) -> None:
    relay = stage.node.pid_of("ray::Relay")
    assert relay is not None
    os.kill(relay, signal.SIGKILL)
    wait_until("another relay", lambda: stage.node.pid_of("ray::Relay") not in (None, relay), 20.0)
    wait_until("it answers", stage.relays_up, 20.0)


def test_a_killed_node_service_comes_back_and_the_agent_never_notices(stage: Stage) -> None:
    raylet = stage.node.pid_of("raylet")
    assert raylet is not None
    os.kill(raylet, signal.SIGKILL)
    wait_until("another node service", lambda: stage.node.pid_of("raylet") not in (None, raylet), 20.0)
    wait_until("the relay is away", lambda: not stage.relays_up(), DEATH_NOTICED_S)
    wait_until("the relay is back", stage.relays_up, DEATH_NOTICED_S)
    assert all(machine.services["agent"].poll() is None for machine in stage.machines)


def test_a_killed_directory_comes_back_with_what_it_knew(stage: Stage) -> None:
    directory, relay = stage.head.pid_of("gcs_server"), stage.node.pid_of("ray::Relay")
    assert directory is not None
    os.kill(directory, signal.SIGKILL)
    wait_until("its end is noticed", lambda: not stage.relays_up(), 10.0)
    wait_until("both relays answer", stage.relays_up, 30.0)
    assert stage.node.pid_of("ray::Relay") == relay, "the actor elsewhere lived through it"


def test_a_killed_keeper_takes_its_ray_along_and_the_next_one_clears_up(stage: Stage) -> None:
    before = set(stage.head.ray_processes())
    assert len(before) >= 6
    stage.head.end("ray", signal.SIGKILL)
    stage.head.start("ray")
    wait_until("it begins anew", lambda: not stage.relays_up(), 10.0)
    assert not before & set(stage.head.ray_processes())
    wait_until("both relays answer", stage.relays_up, 30.0)


def test_no_word_of_ray_reaches_a_person(stage: Stage) -> None:
    for machine in stage.machines:
        said = (machine.home.service_logs_dir / "ray.log").read_text()
        assert "Traceback" not in said
        assert "session_" not in said
        assert "raylet" not in said


def test_nothing_is_left_after_the_end(stage: Stage) -> None:
    for machine in (stage.node, stage.head):
        machine.end("ray")
        assert machine.ray_processes() == {}
        assert machine.status is None


def test_where_ray_cannot_start_the_reason_is_said_in_one_sentence(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    host, _, port = stage.ray_address.rpartition(":")
    try:
        with socket.create_server((host, int(port))):
            stage.head.start("ray")
            wait_until("the reason", lambda: stage.head.status is not None and stage.head.status.state == "down", 20.0)
            assert stage.head.status is not None
            assert stage.head.status.reason == f"port {port}, which Ray needs, is taken by another program"
        wait_until("it tries again", lambda: stage.head.status and stage.head.status.state != "down", 30.0)
    finally:
        stage.close()
    assert Family(stage.head.home.root).members() == set()
