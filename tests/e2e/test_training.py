"""Exact elastic training through the whole house: control process, agent, zygote and workers, with kills."""

import json

import pytest
from conftest import LiveCluster, wait_until

pytestmark = pytest.mark.e2e


def submit(cluster: LiveCluster, *words: str) -> str:
    done = cluster.cli("train", "tiny.py:train", "--detach", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[0]


def final_hash(cluster: LiveCluster, run: str) -> str:
    view = cluster.client().wait(run, timeout_s=60)
    assert view.status == "succeeded", view.failure
    return (cluster.home.output_dir(run) / "hash.txt").read_text()


def steps_of(cluster: LiveCluster, run: str) -> list[dict]:
    files = (cluster.home.node_dir / "workers" / run).rglob("steps.jsonl")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(cluster: LiveCluster) -> str:
    return final_hash(cluster, submit(cluster, "--config", "steps=60"))


def live_worker_pids(cluster: LiveCluster, run: str) -> list[int]:
    return [worker.pid for worker in cluster.client().run(run).workers if worker.status == "ready" and worker.pid]


def committed(cluster: LiveCluster, run: str) -> int:
    progress = cluster.client().run(run).progress
    return progress.step if progress else 0


def test_three_workers_give_the_bits_of_one(cluster: LiveCluster, undisturbed: str) -> None:
    run = submit(cluster, "--config", "steps=60", "--workers", "3")
    assert final_hash(cluster, run) == undisturbed


def test_a_killed_worker_is_replaced_and_leaves_no_mark_on_the_weights(cluster: LiveCluster, undisturbed: str) -> None:
    run = submit(cluster, "--config", "steps=60", "--config", "pause_s=0.05", "--workers", "2..3")
    wait_until(lambda: committed(cluster, run) >= 10, "ten steps")
    cluster.kill(live_worker_pids(cluster, run)[0])
    assert final_hash(cluster, run) == undisturbed
    assert any(event["event"]["event"] == "WorkersPlanned" for event in events(cluster, run))


def events(cluster: LiveCluster, run: str) -> list[dict]:
    return [json.loads(line) for line in cluster.cli("events", run, "-o", "json").stdout.splitlines()]
