"""Machines that join, and machines that may not."""

import json
import sys
from pathlib import Path

import pytest
from hosts_cluster import HostsCluster
from stage import Host

pytestmark = pytest.mark.e2e

CLOCK_OFF = "import time; real = time.time; time.time = lambda: real() + 400\n"


def test_a_command_runs_on_every_host_that_joined(cluster: HostsCluster) -> None:
    told = cluster.command(cluster.head, "run", "--workers", "3", "--", "hostname")
    assert sorted(line.split()[-1] for line in told.splitlines()) == ["h1", "h2", "h3"]


def test_commands_work_on_a_machine_that_joined(cluster: HostsCluster) -> None:
    """One token for the whole cluster: what is typed on any of its machines reaches the head."""
    other = cluster.hosts[2]
    assert cluster.command(other, "run", "--", "echo", "hello").strip() == "hello"
    nodes = json.loads(cluster.command(other, "nodes", "-o", "json"))
    assert {view["node"]["host"] for view in nodes} == {"h1", "h2", "h3"}


def test_a_machine_that_joined_already_is_told_so(cluster: HostsCluster) -> None:
    done = cluster.cli(cluster.hosts[1], "join", cluster.address, "--token-file", "-", input=cluster.token())
    assert done.returncode != 0
    assert "join" in done.stderr and "already" in done.stderr, done.stderr
    assert cluster.nodes()["h2"].node.status == "up", "its first membership is not harmed"


def fresh_host(cluster: HostsCluster) -> Host:
    """One more machine, which has never joined anything."""
    return cluster.hosts.add()


def test_a_token_of_another_cluster_is_refused_and_nothing_is_left_behind(cluster: HostsCluster) -> None:
    stranger = fresh_host(cluster)
    secret, _, pin = cluster.token().partition(":")
    for token, word in ((f"{secret[::-1]}:{pin}", "token"), (f"{secret}:{pin[::-1]}", "certificate")):
        done = cluster.cli(stranger, "join", cluster.address, "--token-file", "-", input=token)
        assert done.returncode == 3, done
        assert word in done.stderr, done.stderr
        assert stranger.pids() == []


def test_a_clock_that_is_off_by_minutes_is_named_with_the_difference(cluster: HostsCluster, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CLOCK_OFF)
    late = fresh_host(cluster)
    path = ":".join([str(tmp_path), *sys.path])
    done = cluster.cli(
        late, "join", cluster.address, "--token-file", "-", input=cluster.token(), env={"PYTHONPATH": path}
    )
    assert done.returncode == 3, done
    assert "clock is 6m 40s ahead" in done.stderr, done.stderr
    assert late.pids() == []


def test_a_head_that_cannot_be_reached_is_named_with_what_was_tried(cluster: HostsCluster) -> None:
    stranger = fresh_host(cluster)
    address = cluster.address.replace(cluster.head.address, stranger.address)
    done = cluster.cli(stranger, "join", address, "--token-file", "-", input=cluster.token())
    assert done.returncode == 3
    assert address in done.stderr, done.stderr


def test_a_bind_address_that_is_not_this_machines_is_refused_with_those_it_has(cluster: HostsCluster) -> None:
    """The wrong network interface."""
    stranger = fresh_host(cluster)
    done = cluster.cli(stranger, "up", "--bind", "10.99.99.99", "--slots", "1")
    assert done.returncode != 0
    assert stranger.address in done.stderr, done.stderr
