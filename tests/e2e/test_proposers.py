"""Tune runs whose points come from a process that learns, with every process on the way killed."""

import os
import signal
from typing import Any

import pytest
from live_cluster import SCRIPTS, LiveCluster, wait_until

pytestmark = pytest.mark.e2e
MODULE = "racimo.worker.tune.propose_process"


def tune(cluster: LiveCluster, **fields: Any) -> str:
    study = {"space": {"x": "0.0..1.0"}, "metric": "loss", "scheduler": "none", "rounds": 3, **fields}
    return cluster.client().tune("bowl.py:train", root=SCRIPTS, **study).id


def proposing(cluster: LiveCluster) -> list[int]:
    return [pid for pid, command in cluster.pids().items() if f"-m {MODULE}" in command]


def begun(cluster: LiveCluster, run: str) -> int:
    return cluster.client().trials(run).num_trials


def test_a_tpe_study_outlives_its_proposer_and_the_control_process(cluster: LiveCluster) -> None:
    """ray#30861, #12347: a restore swaps the searcher for random, or forgets what was pending."""
    run = tune(cluster, proposer="tpe", trials=40, parallel=2)
    wait_until(lambda: begun(cluster, run) >= 13, "some points of the proposer")
    for pid in proposing(cluster):
        cluster.kill(pid)
    wait_until(lambda: begun(cluster, run) >= 20, "points of the next one")
    cluster.kill(cluster.service_pid("control"))
    wait_until(lambda: begun(cluster, run) >= 27, "points after a new control process")
    os.kill(cluster.service_pid("agent"), signal.SIGKILL)
    view = cluster.client().wait(run, timeout_s=60)
    assert view.status == "succeeded", view.failure
    trials = cluster.client().trials(run).trials
    assert len(trials) == 40 and {trial.status for trial in trials} == {"finished"}
    assert [trial.by for trial in trials[:10]] == ["random"] * 10
    assert sum(trial.by == "tpe" for trial in trials[10:]) >= 28
    assert len({trial.values["x"] for trial in trials}) == 40
    learnt = sorted(abs(float(trial.values["x"]) - 0.3) for trial in trials[20:])  # type: ignore[arg-type]
    assert learnt[10] < 0.2, "it looks where it is good"
    wait_until(lambda: not proposing(cluster), "no proposer outlives its run", 20)


@pytest.mark.parametrize("proposer", ["gp", "cma-es", "nsga-ii"])
def test_every_proposer_tunes(cluster: LiveCluster, proposer: str) -> None:
    run = tune(cluster, proposer=proposer, trials=16, parallel=2)
    view = cluster.client().wait(run, timeout_s=90)
    assert view.status == "succeeded", view.failure
    trials = cluster.client().trials(run).trials
    assert len(trials) == 16 and any(trial.by == proposer for trial in trials[10:])


def test_a_users_own_proposer_tunes_and_its_failures_are_shown(cluster: LiveCluster) -> None:
    run = tune(cluster, proposer="bowl.py:Own", trials=14, parallel=2)
    broken = tune(cluster, proposer="bowl.py:Broken", trials=30, parallel=2)
    outside = tune(cluster, proposer="bowl.py:Outside", trials=30, parallel=2)
    client = cluster.client()
    assert client.wait(run, timeout_s=60).status == "succeeded"
    assert {trial.by for trial in client.trials(run).trials[10:]} == {"bowl.py:Own"}
    view = client.wait(broken, timeout_s=60)
    assert view.status == "failed" and view.failure is not None and view.failure.code == "proposer-failed"
    assert "KeyError: 'no such idea'" in view.failure.message and "bowl.py" in view.failure.traceback
    view = client.wait(outside, timeout_s=60)
    assert view.failure is not None and "17.0 is not within 0.0..1.0" in view.failure.message
