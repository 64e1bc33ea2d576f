"""Exact elastic training through the whole house: control process, agent, zygote and workers, with kills."""

import pytest
from live_cluster import LiveCluster, committed, events, final_hash, live_worker_pids, submit, wait_until

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def undisturbed(cluster: LiveCluster) -> str:
    return final_hash(cluster, submit(cluster, "--config", "steps=60"))


def test_three_workers_give_the_bits_of_one(cluster: LiveCluster, undisturbed: str) -> None:
    run = submit(cluster, "--config", "steps=60", "--workers", "3")
    assert final_hash(cluster, run) == undisturbed


def test_a_killed_worker_is_replaced_and_leaves_no_mark_on_the_weights(cluster: LiveCluster, undisturbed: str) -> None:
    run = submit(cluster, "--config", "steps=60", "--config", "pause_s=0.05", "--workers", "2..3")
    wait_until(lambda: committed(cluster, run) >= 10, "ten steps")
    cluster.kill(live_worker_pids(cluster, run)[0])
    assert final_hash(cluster, run) == undisturbed
    assert any(event["event"]["event"] == "WorkersPlanned" for event in events(cluster, run))
