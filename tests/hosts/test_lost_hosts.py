"""Work that only its user understands, on hosts that cannot be reached."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_cluster import HostsCluster, wait_until
from stage import Host

from racimo.spec.run import RunSpec

pytestmark = pytest.mark.e2e

PROGRAM = 'echo "from $(hostname)"; echo "$(hostname)" >> {record}; for i in $(seq {seconds}0); do sleep 0.1; done'


def submit(cluster: HostsCluster, record: Path, seconds: int, retries: int = 0) -> str:
    """Three workers, one on each host; each writes its host's name when it begins."""
    script = PROGRAM.format(record=record, seconds=seconds)
    spec = RunSpec(command=("sh", "-c", script), files="", workers=3, retries=retries)
    with cluster.api() as client:
        run = client.submit(spec).id
    wait_until(lambda: record.exists() and len(record.read_text().split()) == 3, "all have begun", 20,
               lambda: cluster.story(run))  # fmt: skip
    return run


@pytest.fixture
def far(cluster: HostsCluster) -> Iterator[Host]:
    yield cluster.hosts[2]
    cluster.hosts[2].heal()
    cluster.wait_nodes(3, 20)


def silent(cluster: HostsCluster, host: Host) -> bool:
    return cluster.nodes()[host.name].node.status != "up"


def test_logs_of_a_lost_host_can_be_read(cluster: HostsCluster, far: Host, tmp_path: Path) -> None:
    """kuberay#1047, ray#44561: logs are gone with the machine, or with the head's next start."""
    run = submit(cluster, tmp_path / "record", 60)
    wait_until(lambda: "from h3" in cluster.command(cluster.head, "logs", run), "its first line", 10)
    time.sleep(1.0)  # what is copied to the head is not announced
    far.cut()
    wait_until(lambda: silent(cluster, far), "silence", 10)
    done = cluster.cli(cluster.head, "logs", run)
    assert sorted(line.split()[-1] for line in done.stdout.splitlines()) == ["h1", "h2", "h3"], done
    assert "h3" in done.stderr, f"that it is a copy is said: {done.stderr}"
    cluster.kill(cluster.head, "control")
    wait_until(lambda: "from h3" in cluster.cli(cluster.head, "logs", run).stdout, "the same after a restart", 20)
    cluster.cli(cluster.head, "stop", run)


def test_a_command_on_a_silent_host_is_neither_moved_nor_repeated(
    cluster: HostsCluster, far: Host, tmp_path: Path
) -> None:
    record = tmp_path / "record"
    run = submit(cluster, record, 6)
    far.cut()
    wait_until(lambda: silent(cluster, far), "silence", 10)
    why = cluster.command(cluster.head, "why", run)
    assert "h3" in why and "forget" in why, why
    time.sleep(5)
    assert cluster.view(run).status == "running", "its outcome there is not known yet"
    far.heal()
    view = cluster.wait(run, 30)
    assert view.status == "succeeded", cluster.story(run, view)
    assert sorted(record.read_text().split()) == ["h1", "h2", "h3"], "each worker ran once"


def test_who_vouches_that_a_host_is_dead_frees_its_work_at_once(cluster: HostsCluster, tmp_path: Path) -> None:
    """The run has retries, so it runs again, on hosts that are there; the host that was given up may join anew."""
    fourth = cluster.hosts.add()
    cluster.join(fourth, slots=1)
    cluster.wait_nodes(4)
    record = tmp_path / "record"
    script = f'hostname >> {record}; [ "$(hostname)" = {fourth.name} ] && sleep 100; exit 0'
    spec = RunSpec(command=("sh", "-c", script), files="", workers=4, retries=1, threads=1)
    with cluster.api() as client:
        run = client.submit(spec).id
    wait_until(lambda: record.exists() and fourth.name in record.read_text(), "a start there", 20)
    node = cluster.nodes()[fourth.name].node.id
    fourth.power_off()
    wait_until(lambda: silent(cluster, fourth), "silence", 10)
    assert cluster.view(run).status == "running"
    cluster.command(cluster.head, "nodes", "forget", node, "--confirm-dead")
    wait_until(lambda: cluster.view(run).status != "running", "the end of that attempt", 10,
               lambda: cluster.story(run))  # fmt: skip
    assert cluster.view(run).status == "queued", "four slots are needed and three are there"
    cluster.command(cluster.head, "stop", run)
