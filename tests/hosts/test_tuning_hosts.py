"""Trials over three hosts: what a trial saved on one of them comes along to the next."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hosts_cluster import HostsCluster, wait_until

from racimo.client.tuning import tune_fields
from racimo.control.views import RunView
from racimo.spec.build import build_spec

pytestmark = pytest.mark.e2e
SCRIPTS = Path(__file__).parent.parent / "e2e" / "scripts"
ROUNDS = 40
Curves = dict[float, tuple[tuple[int, float], ...]]


def tune(cluster: HostsCluster, function: str, **fields: Any) -> str:
    study = {
        "space": {"x": "0.0..1.0 step 0.5"}, "metric": "loss", "proposer": "grid", "trials": 3, "scheduler": "none",
        "config": {"rounds": ROUNDS, "round_s": 0.1},
    }  # fmt: skip
    return cluster.submit(build_spec(tune_fields(f"trials.py:{function}", study | fields)), SCRIPTS)


def curves(cluster: HostsCluster, run: str) -> Curves:
    with cluster.api() as client:
        return {float(trial.values["x"]): trial.curve for trial in client.trials(run).trials}  # type: ignore[arg-type]


def num_reports(cluster: HostsCluster, run: str) -> int:
    with cluster.api() as client:
        return len(client.reports(run).reports)


def ended(cluster: HostsCluster, run: str) -> RunView:
    view = cluster.wait(run, 90)
    assert view.status == "succeeded", cluster.story(run, view)
    return view


@pytest.fixture(scope="module")
def undisturbed(cluster: HostsCluster) -> dict[str, Curves]:
    found = {}
    for function in ("rounds", "steps"):
        run = tune(cluster, function, config={"rounds": ROUNDS})
        ended(cluster, run)
        found[function] = curves(cluster, run)
    return found


@pytest.mark.parametrize("function", ["rounds", "steps"])
def test_the_trials_of_a_drained_host_go_on_elsewhere_where_they_were(
    cluster: HostsCluster, undisturbed: dict[str, Curves], function: str
) -> None:
    run = tune(cluster, function)
    wait_until(lambda: num_reports(cluster, run) >= 20, "twenty rounds", 30, lambda: cluster.story(run))
    cluster.command(cluster.head, "drain", "h3")
    try:
        wait_until(lambda: not cluster.worker_pids(run, cluster.hosts[2]), "it is empty", 20)
        ended(cluster, run)
    finally:
        cluster.command(cluster.head, "drain", "h3", "--undo")
    assert curves(cluster, run) == undisturbed[function]
    with cluster.api() as client:
        reports = [(report.trial, report.step) for report in client.reports(run).reports]
    assert len(reports) == len(set(reports)) == 3 * ROUNDS


def test_a_trial_whose_worker_was_killed_goes_on_where_its_state_is(
    cluster: HostsCluster, undisturbed: dict[str, Curves]
) -> None:
    run = tune(cluster, "rounds", retries=9)
    for count in (20, 50):
        wait_until(lambda count=count: num_reports(cluster, run) >= count, f"{count} rounds", 30)  # type: ignore[misc]
        for pid in cluster.worker_pids(run).values():
            os.kill(pid, signal.SIGKILL)
    ended(cluster, run)
    assert curves(cluster, run) == undisturbed["rounds"]
    with cluster.api() as client:
        assert len(client.reports(run).reports) == 3 * ROUNDS


def test_a_host_that_dies_costs_no_result(cluster: HostsCluster, undisturbed: dict[str, Curves]) -> None:
    """What its trial had saved lies on it: the trial begins anew elsewhere, and ends with the same curve."""
    run = tune(cluster, "rounds")
    wait_until(lambda: num_reports(cluster, run) >= 20, "twenty rounds", 30, lambda: cluster.story(run))
    far = cluster.hosts[2]
    far.cut()
    try:
        with cluster.api() as client:
            wait_until(lambda: client.trials(run).counts.get("finished", 0) >= 2, "the others end", 60)
    finally:
        far.heal()
    ended(cluster, run)
    assert curves(cluster, run) == undisturbed["rounds"]
