"""Training over three hosts through everything that hosts do: the bits are those of one undisturbed worker."""

import os
import signal
import time

import pytest
from hosts_cluster import HostsCluster, wait_until

pytestmark = pytest.mark.e2e

STEPS = 120


def train(cluster: HostsCluster, workers: str = "1..3", pause_s: float = 0.04) -> str:
    return cluster.train("--config", f"steps={STEPS}", "--config", f"pause_s={pause_s}", "--workers", workers)


def on_every_host(cluster: HostsCluster, run: str) -> bool:
    return all(cluster.worker_pids(run, host) for host in list(cluster.hosts)[:3])


def newer_step(cluster: HostsCluster, run: str, since_s: float) -> bool:
    """Whether anybody committed a step after that moment."""
    return any(line["t"] > since_s for line in cluster.steps(run))


@pytest.fixture(scope="module")
def undisturbed(cluster: HostsCluster) -> str:
    return cluster.final_hash(cluster.train("--config", f"steps={STEPS}", "--workers", "1"))


@pytest.fixture
def training(cluster: HostsCluster) -> str:
    """A run with a worker on each of the three hosts, some steps in."""
    run = train(cluster)
    wait_until(lambda: on_every_host(cluster, run), "a worker on every host", 30, lambda: cluster.story(run))
    cluster.wait_step(run, cluster.committed(run) + 5)
    return run


def test_three_hosts_give_the_bits_of_one_worker(cluster: HostsCluster, undisturbed: str) -> None:
    run = train(cluster, "3", pause_s=0.0)
    assert cluster.final_hash(run) == undisturbed
    cluster.assert_every_micro_shard_once(run, STEPS)


def test_a_host_that_is_cut_off_and_healed_is_passed_over_and_then_used_again(
    cluster: HostsCluster, undisturbed: str, training: str
) -> None:
    """torchft#309: who comes back is not one batch behind for ever. torchft#63: who is gone is forgotten meanwhile."""
    far = cluster.hosts[2]
    cut_s = time.monotonic()
    far.cut()
    try:
        wait_until(lambda: newer_step(cluster, training, cut_s + 0.5), "a step without it", 10,
                   lambda: cluster.story(training))  # fmt: skip
        view = cluster.nodes()["h3"].node
        assert view.status != "up", view
    finally:
        far.heal()
    healed_s = time.monotonic()
    wait_until(
        lambda: any(line["t"] > healed_s and line["shards"] for line in cluster.steps(training, far)),
        "a contribution of the host that is back",
        20,
        lambda: cluster.story(training),
    )
    assert cluster.final_hash(training) == undisturbed
    cluster.assert_every_micro_shard_once(training, STEPS)


def test_the_host_of_rank_0_which_is_the_head_dies_and_comes_back(
    cluster: HostsCluster, undisturbed: str, training: str
) -> None:
    """pytorch#67742: the machine that hosts the rendezvous dies and takes everyone along. Here nobody hosts one."""
    died_s = time.monotonic()
    cluster.head.power_off()
    time.sleep(0.5)
    cluster.up()
    cluster.wait_nodes(3, 30)
    assert {pid for host in list(cluster.hosts)[1:3] for pid in cluster.worker_pids(training, host).values()}
    assert cluster.final_hash(training) == undisturbed
    assert newer_step(cluster, training, died_s)
    assert cluster.view(training).attempt == 1, "the workers elsewhere went on"
    cluster.assert_every_micro_shard_once(training, STEPS)


def test_a_one_way_cut_stops_nobody_for_good(cluster: HostsCluster, undisturbed: str, training: str) -> None:
    """What the host sends is lost, what it is sent arrives: its links look alive from one side."""
    far = cluster.hosts[1]
    cut_s = time.monotonic()
    far.cut("out")
    try:
        wait_until(lambda: newer_step(cluster, training, cut_s + 1.0), "a step without it", 20,
                   lambda: cluster.story(training))  # fmt: skip
    finally:
        far.heal()
    assert cluster.final_hash(training) == undisturbed
    cluster.wait_nodes(3, 20)


def test_any_service_of_a_joined_host_may_be_killed(cluster: HostsCluster, undisturbed: str, training: str) -> None:
    far = cluster.hosts[1]
    for role in ("agent", "supervisor"):
        record = cluster.service(far, role)
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)
        wait_until(
            lambda role=role, old=record.pid: (now := cluster.service(far, role)) is not None and now.pid != old,
            f"a new {role}",
            15,
        )
    assert cluster.final_hash(training) == undisturbed
    assert cluster.view(training).attempt == 1
    cluster.wait_nodes(3, 20)


def test_a_host_that_is_drained_gives_its_worker_up_and_no_sample_is_repeated(
    cluster: HostsCluster, undisturbed: str, training: str
) -> None:
    """horovod#3399: a node leaving gracefully makes already trained samples repeat."""
    far = cluster.hosts[2]
    node = cluster.nodes()["h3"].node.id
    cluster.command(cluster.head, "drain", node)
    try:
        wait_until(lambda: not cluster.worker_pids(training, far), "no worker there", 15,
                   lambda: cluster.story(training))  # fmt: skip
        assert cluster.nodes()["h3"].node.draining
        assert cluster.final_hash(training) == undisturbed
        cluster.assert_every_micro_shard_once(training, STEPS)
    finally:
        cluster.command(cluster.head, "drain", node, "--undo")


def test_growing_by_one_takes_seconds(cluster: HostsCluster, undisturbed: str) -> None:
    """dlrover#1534: scaling up from 5 to 6 stays stuck for minutes."""
    run = train(cluster, "2", pause_s=0.06)
    cluster.wait_step(run, 5)
    asked_s = time.monotonic()
    cluster.command(cluster.head, "scale", run, "3")
    wait_until(
        lambda: (
            on_every_host(cluster, run)
            and all(
                any(line["t"] > asked_s and line["shards"] for line in cluster.steps(run, host))
                for host in list(cluster.hosts)[:3]
            )
        ),
        "contributions of all three",
        15,
        lambda: cluster.story(run),
    )
    assert cluster.final_hash(run) == undisturbed


def test_a_torchrun_script_finds_the_right_address_and_number_of_processes(cluster: HostsCluster) -> None:
    """accelerate#2362, #2818: wrong address or process count picked up silently on several machines."""
    told = cluster.command(cluster.head, "train", "torchrun_script.py", "--workers", "3")
    lines = sorted(line.partition("] ")[2] for line in told.splitlines() if "] rank " in line)
    assert lines == [f"rank {rank} of 3 sees 6" for rank in range(3)], told
