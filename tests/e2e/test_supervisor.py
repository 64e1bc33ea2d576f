"""Supervisor, control process and agent as real processes: each repairs the others, and the end leaves nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest
from live_cluster import LiveCluster, wait_until

from racimo.act import guardian
from racimo.control.supervisor import EXIT_REFUSED
from racimo.version import PROTOCOL_VERSION

pytestmark = pytest.mark.e2e


def http(cluster: LiveCluster) -> httpx.Client:
    address = json.loads(cluster.home.cluster_file.read_bytes())["address"]
    token = cluster.home.token_file.read_text()
    headers = {"Authorization": f"Bearer {token}", "Racimo-Protocol": str(PROTOCOL_VERSION)}
    return httpx.Client(base_url=address, headers=headers)


def live(cluster: LiveCluster, role: str) -> int | None:
    record = guardian.read_live(cluster.home.root, role)
    return None if record is None else record.pid


def other(cluster: LiveCluster, role: str, old: int) -> bool:
    return live(cluster, role) not in (None, old)


def test_services_repair_each_other_one_by_one_and_in_pairs(fresh_cluster: LiveCluster) -> None:
    cluster = fresh_cluster
    cluster.up()
    address = cluster.home.cluster_file.read_bytes()
    for roles in (("control",), ("agent",), ("supervisor",), ("supervisor", "control"), ("supervisor", "agent")):
        before = {role: live(cluster, role) for role in ("supervisor", "control", "agent")}
        for role in roles:
            cluster.kill(before[role] or 0)
        for role in roles:
            wait_until(partial(other, cluster, role, before[role] or 0), f"a new {role} after {roles}", 10)
        for role in set(before) - set(roles):
            assert live(cluster, role) == before[role], f"{role} went on and was adopted"
        assert cluster.cli("run", "--files", "", "--", "echo", "alive").stdout == "alive\n", roles
    assert cluster.home.cluster_file.read_bytes() == address, "the address stays the same"
    assert len([name for name in cluster.pids().values() if "racimo.control.supervisor" in name]) == 1


def test_a_second_supervisor_says_who_is_there_and_leaves(fresh_cluster: LiveCluster) -> None:
    fresh_cluster.up()
    holder = live(fresh_cluster, "supervisor")
    command = [sys.executable, "-m", "racimo.control.supervisor", "--home", str(fresh_cluster.home.root)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert second.returncode == guardian.SUPERVISOR_HELD
    assert f"process {holder}" in second.stderr


def test_a_spare_of_systemds_waits_takes_over_and_ends_the_cluster(fresh_cluster: LiveCluster) -> None:
    """systemd's own process runs beside a supervisor that somebody else started, and what it is told counts."""
    cluster = fresh_cluster
    cluster.up()
    command = [sys.executable, "-m", "racimo.control.supervisor", "--home", str(cluster.home.root), "--service"]
    spare = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert spare.stderr is not None
    assert f"process {live(cluster, 'supervisor')} already" in spare.stderr.readline()
    services = {role: live(cluster, role) for role in ("control", "agent")}
    for role in services:  # which would be quicker to start a new one
        os.kill(services[role] or 0, signal.SIGSTOP)
    cluster.kill(live(cluster, "supervisor") or 0)
    wait_until(lambda: live(cluster, "supervisor") == spare.pid, "the spare is the supervisor", 10)
    for role in services:
        os.kill(services[role] or 0, signal.SIGCONT)
    assert {role: live(cluster, role) for role in services} == services, "it has adopted what there was"
    other_spare = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert other_spare.stderr is not None
    assert f"process {spare.pid} already" in other_spare.stderr.readline()
    other_spare.send_signal(signal.SIGTERM)  # as `systemctl stop`
    assert other_spare.wait(60) == 0 and spare.wait(60) == 0
    wait_until(lambda: not cluster.pids(), f"no process left: {cluster.pids()}", 10)


@pytest.mark.parametrize("how", ["api", "signal"])
def test_the_end_leaves_nothing_even_when_the_agent_is_down(fresh_cluster: LiveCluster, how: str) -> None:
    cluster = fresh_cluster
    cluster.up()
    run = cluster.cli("run", "--files", "", "--detach", "--", "sleep", "600").stdout.split()[0]
    with http(cluster) as client:
        wait_until(lambda: client.get(f"/v1/runs/{run}").json()["workers"][0].get("pid"), "the worker runs")
        worker = client.get(f"/v1/runs/{run}").json()["workers"][0]["pid"]
        cluster.home.config_file.write_text('{"slots": "nonsense"}')  # from now on the agent cannot start
        cluster.kill(live(cluster, "agent") or 0)
        assert Path(f"/proc/{worker}").exists(), "workers outlive the agent"
        log = Path(cluster.home.service_logs_dir, "supervisor.log")
        wait_until(lambda: "; again in 0.1 s" in log.read_text(), "restarts become slower, and the log says so", 10)
        if how == "api":
            assert client.post("/v1/shutdown").json() == {"stopped": ["sleep-1"]}
        else:
            os.kill(live(cluster, "supervisor") or 0, signal.SIGTERM)
    wait_until(lambda: not cluster.pids(), "every process gone", 20)
    assert not Path(f"/proc/{worker}").exists()
    assert not cluster.home.cluster_file.exists() and list(cluster.home.processes_dir.iterdir()) == []
    cluster.home.config_file.unlink()
    cluster.up()  # and the lock is free
    assert cluster.cli("run", "--files", "", "--", "echo", "again").stdout == "again\n"


def test_a_home_that_was_deleted_ends_its_cluster_and_not_the_next_one_there(fresh_cluster: LiveCluster) -> None:
    cluster = fresh_cluster
    cluster.up()
    cluster.cli("run", "--files", "", "--detach", "--", "sh", "-c", "setsid sleep 600 & sleep 600")
    wait_until(lambda: sum("sleep 600" in name for name in cluster.pids().values()) >= 2, "the worker runs")
    old = set(cluster.pids())
    cluster.home.root.rename(cluster.home.root.with_name("gone"))
    shutil.rmtree(cluster.home.root.with_name("gone"))
    cluster.up()
    assert cluster.cli("run", "--files", "", "--", "echo", "the next").stdout == "the next\n"
    wait_until(
        lambda: not old & set(cluster.pids()), "every process of the old cluster gone", guardian.LOOK_AT_HOME_S + 5
    )
    services = {role: live(cluster, role) for role in ("supervisor", "control", "agent")}
    assert None not in services.values() and not old & set(services.values())


def test_a_home_that_went_with_its_supervisor_is_not_made_anew_by_the_services(fresh_cluster: LiveCluster) -> None:
    cluster = fresh_cluster
    cluster.up()
    supervisor = live(cluster, "supervisor") or 0
    cluster.home.root.rename(cluster.home.root.with_name("gone"))
    cluster.kill(supervisor)
    wait_until(lambda: not cluster.pids(), "every process gone", 10)
    assert not cluster.home.root.exists()


def test_a_home_that_cannot_be_used_ends_the_supervisor_with_the_reason(fresh_cluster: LiveCluster) -> None:
    home = fresh_cluster.home
    home.journal_file.parent.mkdir(mode=0o700, parents=True)
    home.root.chmod(0o700)
    home.journal_file.write_bytes(os.urandom(100_000))
    pid = guardian.start_supervisor(home.root)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == EXIT_REFUSED
    assert "journal-unreadable" in Path(home.service_logs_dir, "supervisor.log").read_text()
    assert not fresh_cluster.pids()


def test_the_supervisor_is_small(fresh_cluster: LiveCluster) -> None:
    fresh_cluster.up()
    status = Path(f"/proc/{live(fresh_cluster, 'supervisor')}/status").read_text()
    anonymous_kb = int(status.partition("RssAnon:")[2].split()[0])
    assert anonymous_kb < 8_000
