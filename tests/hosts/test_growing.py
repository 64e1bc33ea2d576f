"""From one machine to several, with work running."""

from collections.abc import Callable

import pytest
from hosts_cluster import HostsCluster, wait_until
from stage import Hosts

pytestmark = pytest.mark.e2e

STEPS = 250
"""Long enough for a second machine to join on a machine that has much to do."""


def test_a_cluster_of_one_machine_grows_while_it_works(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2)
    cluster = HostsCluster(hosts, 1)
    cluster.up(bind=False)
    undisturbed = cluster.final_hash(cluster.train("--config", f"steps={STEPS}"))
    run = cluster.train("--config", f"steps={STEPS}", "--config", "pause_s=0.06", "--workers", "1..2")
    cluster.wait_step(run, 3)
    first = cluster.worker_pids(run)
    cluster.up()
    cluster.join(hosts[1])
    wait_until(lambda: cluster.steps(run, hosts[1]), "a step of the new host", 20, lambda: cluster.story(run))
    assert first.items() <= cluster.worker_pids(run).items(), "the worker that ran before runs still"
    assert cluster.final_hash(run) == undisturbed
    assert cluster.view(run).attempt == 1
    cluster.assert_every_micro_shard_once(run, STEPS)
    cluster.down()
    assert [host.pids() for host in hosts] == [[], []], "nothing is left"
