"""Files, modules and measurements on several hosts: sent once over the head's link, refused with host and module name,
and what is wrong between two hosts is named with both."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_cluster import HostsCluster
from stage import Host, Hosts

from racimo.control.views import CheckView
from racimo.spec.run import RunSpec

NUM_BYTES = 40_000_000
SMALL_BYTES = 2_000_000
"""What else may pass over the head's link meanwhile: signs of life, orders, logs, small files."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsCluster]:
    """Three hosts; only on the second one there is a module of the name `only_on_h2`."""
    modules = tmp_path_factory.mktemp("modules")
    (modules / "only_on_h2.py").write_text("")
    with Hosts(3) as hosts:
        made = HostsCluster(hosts, slots=1)
        try:
            made.up()
            for host in (hosts[1], hosts[2]):
                extra = {"PYTHONPATH": str(modules)} if host is hosts[1] else {}
                line = ["join", made.address, "--token-file", "-", "--slots", "1"]
                made.command(host, *line, input=made.token() + "\n", env=extra)
            made.wait_nodes(3)
            yield made
        finally:
            made.down()


def sent_bytes(host: Host) -> int:
    lines = host.run(["cat", "/proc/net/dev"]).stdout.splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("eth0:"))


def submit(cluster: HostsCluster, folder: Path) -> tuple[str, list[int]]:
    """Runs `job.py` of that folder on all hosts; the run's id, and what each host sent meanwhile."""
    before = [sent_bytes(host) for host in cluster.hosts]
    run = cluster.submit(RunSpec(train="job.py", workers=3), folder)
    view = cluster.wait(run, timeout_s=60)
    assert view.status == "succeeded", cluster.story(run, view)
    assert len({worker.node for worker in view.workers}) == 3
    return run, [sent_bytes(host) - old for host, old in zip(cluster.hosts, before, strict=True)]


def test_files_pass_over_the_heads_link_once_and_not_again_the_second_time(
    cluster: HostsCluster, tmp_path: Path
) -> None:
    (tmp_path / "big.bin").write_bytes(os.urandom(NUM_BYTES))
    (tmp_path / "job.py").write_text(f"import os\nassert os.path.getsize('big.bin') == {NUM_BYTES}\n")
    for number in range(50):
        (tmp_path / f"small{number}.txt").write_text(f"small {number}")
    _, (head, *others) = submit(cluster, tmp_path)
    assert NUM_BYTES <= head < NUM_BYTES * 1.05 + SMALL_BYTES
    assert NUM_BYTES <= sum(others) < NUM_BYTES * 1.05 + SMALL_BYTES, "one of them passes it on to the other"
    _, again = submit(cluster, tmp_path)
    assert sum(again) < SMALL_BYTES


def test_a_module_missing_on_some_hosts_is_named_with_them_and_nothing_starts(
    cluster: HostsCluster, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text("import only_on_h2\n")
    run = cluster.submit(RunSpec(train="job.py", workers=3), tmp_path)
    view = cluster.wait(run, timeout_s=60)
    assert view.status == "failed" and view.failure is not None
    assert view.failure.code == "module-missing"
    assert "'only_on_h2' (job.py:1)" in view.failure.message
    assert any(f"{host} (" in view.failure.message for host in ("h1", "h3"))
    assert "--env requirements.txt" in view.failure.hint
    assert all(worker.pid is None for worker in view.workers), "also where the module is, nothing began"


def test_a_pair_that_cannot_reach_each_other_is_named_by_the_check(cluster: HostsCluster) -> None:
    two, three = cluster.hosts[1], cluster.hosts[2]
    nodes = {host: view.node.id for host, view in cluster.nodes().items()}
    two.run(["ip", "route", "add", "blackhole", f"{three.address}/32"])
    try:
        with cluster.api() as client:
            view = client._session.call("GET", "/v1/check", CheckView)
    finally:
        two.run(["ip", "route", "delete", "blackhole", f"{three.address}/32"])
    ways = {(finding.node, finding.peer): finding for finding in view.findings if finding.about == "way"}
    assert len(ways) == 6
    wrong = {pair for pair, finding in ways.items() if finding.verdict == "wrong"}
    assert wrong == {(nodes["h2"], nodes["h3"]), (nodes["h3"], nodes["h2"])}
    found = ways[nodes["h2"], nodes["h3"]]
    assert "h2 cannot reach h3" in found.found and three.address in found.found and "7701-8799" in found.cure
    assert view.took_s < 15
    assert all(finding.verdict != "wrong" for finding in view.findings if finding.about != "way")
    ports = {finding.node: finding.found for finding in view.findings if finding.about == "ports"}
    assert f"{cluster.address} (control)" in ports[nodes["h1"]]
    assert f"{two.address}:7701 (agent)" in ports[nodes["h2"]]
