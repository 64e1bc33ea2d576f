"""Trials in real processes, with every process of the cluster killed at any moment."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from live_cluster import SCRIPTS, LiveCluster, live_worker_pids, wait_until

from racimo.client import Client
from racimo.control.views import RunView, TrialView

pytestmark = pytest.mark.e2e
GRID = {"space": {"x": "0.0..1.0 step 0.25"}, "metric": "loss", "proposer": "grid", "trials": 5}
ENDED = ("succeeded", "failed", "stopped", "lost")


def tune(cluster: LiveCluster, function: str, **fields: Any) -> str:
    return cluster.client().tune(f"trials.py:{function}", root=SCRIPTS, **GRID | fields).id


def ended(cluster: LiveCluster, run: str, timeout_s: float = 60.0) -> RunView:
    view = cluster.client().wait(run, timeout_s=timeout_s)
    assert view.status in ENDED, f"{run} is {view.status} after {timeout_s} s: {cluster.client().why(run)}"
    return view


def trials(cluster: LiveCluster, run: str) -> list[TrialView]:
    return sorted(cluster.client().trials(run).trials, key=lambda trial: trial.number)


def rounds_so_far(client: Client, run: str) -> int:
    return sum(report.trial is not None for report in client.reports(run).reports)


def curves(cluster: LiveCluster, run: str) -> dict[float, tuple[tuple[int, float], ...]]:
    return {float(trial.values["x"]): trial.curve for trial in trials(cluster, run)}  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def undisturbed(cluster: LiveCluster) -> dict[str, dict[float, tuple[tuple[int, float], ...]]]:
    """The curves of all points, by function."""
    found = {}
    for function in ("rounds", "steps"):
        run = tune(cluster, function, scheduler="none", parallel=2)
        assert ended(cluster, run).status == "succeeded"
        found[function] = curves(cluster, run)
        assert all(len(curve) == 12 for curve in found[function].values())
    return found


def test_a_study_ends_with_all_its_trials_and_the_best_one(cluster: LiveCluster) -> None:
    run = tune(cluster, "number")
    assert ended(cluster, run).status == "succeeded"
    view = cluster.client().trials(run)
    assert view.counts == {"finished": 5}
    assert view.best == next(trial.number for trial in view.trials if trial.values["x"] == 0.0)


@pytest.mark.parametrize("function", ["rounds", "steps"])
def test_trials_that_are_paused_and_resumed_have_the_curves_of_undisturbed_ones(
    cluster: LiveCluster, undisturbed: Any, function: str
) -> None:
    run = tune(cluster, function, scheduler="asha", rounds=12, eta=2, parallel=2)
    assert ended(cluster, run).status == "succeeded"
    expected = undisturbed[function]
    found = curves(cluster, run)
    assert all(curve == expected[x][: len(curve)] for x, curve in found.items())
    assert max(map(len, found.values())) >= 2  # of five the best two went on, one after the other
    steps = [(report.trial, report.step) for report in cluster.client().reports(run).reports]
    assert len(steps) == len(set(steps)) == sum(map(len, found.values()))


@pytest.mark.parametrize("victim", ["worker", "agent", "control"])
@pytest.mark.parametrize("function", ["rounds", "steps"])
def test_no_result_is_lost_or_doubled_whatever_is_killed(
    cluster: LiveCluster, undisturbed: Any, function: str, victim: str
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    config = {"round_s": 0.05}
    run = tune(cluster, function, scheduler="none", parallel=2, retries=50, config=config)
    client = cluster.client()
    wait_until(lambda: client.trials(run).counts.get("running"), "the first trials")
    for _ in range(6):
        time.sleep(chance.uniform(0.05, 0.4))  # at a random moment, on purpose
        if client.run(run).status in ENDED:
            break
        pids = live_worker_pids(cluster, run) if victim == "worker" else [cluster.service_pid(victim)]
        for pid in pids[:1]:
            with suppress(ProcessLookupError):  # it is being started again
                cluster.kill(pid)
    assert ended(cluster, run).status == "succeeded"
    assert curves(cluster, run) == undisturbed[function]
    steps = [(report.trial, report.step) for report in client.reports(run).reports]
    assert len(steps) == len(set(steps)) == 60


def test_a_study_that_is_paused_goes_on_where_its_trials_were(cluster: LiveCluster, undisturbed: Any) -> None:
    run = tune(cluster, "rounds", scheduler="none", parallel=2, config={"round_s": 0.05})
    client = cluster.client()
    wait_until(lambda: rounds_so_far(client, run) >= 10, "ten rounds")
    client.pause(run)
    wait_until(lambda: client.run(run).status == "paused", "it is paused")
    waiting = [trial for trial in trials(cluster, run) if trial.status == "waiting" and trial.rounds]
    assert waiting
    client.resume(run)
    assert ended(cluster, run).status == "succeeded"
    assert curves(cluster, run) == undisturbed["rounds"]


def test_a_study_is_widened_and_narrowed_while_it_runs(cluster: LiveCluster, undisturbed: Any) -> None:
    run = tune(cluster, "steps", scheduler="none", parallel=1, config={"round_s": 0.05})
    client = cluster.client()
    wait_until(lambda: len(live_worker_pids(cluster, run)) == 1, "one worker")
    client.scale(run, "1..3")
    wait_until(lambda: len(live_worker_pids(cluster, run)) == 3, "three workers")
    client.scale(run, "1..1")
    wait_until(lambda: len(live_worker_pids(cluster, run)) == 1, "one worker again")
    assert ended(cluster, run).status == "succeeded"
    assert curves(cluster, run) == undisturbed["steps"]


def test_a_function_that_cannot_be_left_costs_its_process_and_no_other_trial(
    cluster: LiveCluster,
) -> None:
    run = tune(cluster, "stubborn", rounds=2, scheduler="none", parallel=2, stop_grace="0.3s")
    assert ended(cluster, run).status == "succeeded"
    found = trials(cluster, run)
    assert {(trial.status, trial.rounds, trial.retries) for trial in found} == {("finished", 2, 0)}
    assert {(report.trial, report.values["loss"]) for report in cluster.client().reports(run).reports} == {
        (trial.number, trial.values["x"]) for trial in found
    }


def test_a_metric_that_never_comes_fails_the_trial_by_name(cluster: LiveCluster) -> None:
    run = tune(cluster, "silent", metric_within="1s", parallel=2)
    assert ended(cluster, run).status == "succeeded"
    for trial in trials(cluster, run):
        late = float(trial.values["x"]) > 0.5  # type: ignore[arg-type]
        assert trial.status == ("failed" if late else "finished")
        assert not late or (trial.failure is not None and trial.failure.code == "metric-late")


def test_a_report_from_another_thread_ends_the_slice_and_the_function(cluster: LiveCluster) -> None:
    run = tune(cluster, "from_a_thread", rounds=3, scheduler="none", parallel=2)
    assert ended(cluster, run).status == "succeeded"
    assert {(trial.status, trial.rounds) for trial in trials(cluster, run)} == {("finished", 3)}


def test_trials_find_nothing_of_one_another_in_their_process(cluster: LiveCluster) -> None:
    run = tune(cluster, "untidy", parallel=1)
    assert ended(cluster, run).status == "succeeded"
    found = trials(cluster, run)
    assert [trial.metrics["loss"] for trial in found] == [0.0] * 5
    assert len({trial.metrics["pid"] for trial in found}) == 1
    wait_until(lambda: not any("sleep 3600" in command for command in cluster.pids().values()), "no child is left")


def test_a_fresh_study_gives_each_trial_a_process_of_its_own(cluster: LiveCluster) -> None:
    run = tune(cluster, "untidy", parallel=1, fresh=True)
    assert ended(cluster, run).status == "succeeded"
    found = trials(cluster, run)
    assert [trial.metrics["loss"] for trial in found] == [0.0] * 5
    assert len({trial.metrics["pid"] for trial in found}) == 5
    assert {trial.retries for trial in found} == {0}


def test_a_fresh_study_outlives_kills_of_its_processes(cluster: LiveCluster, undisturbed: Any) -> None:
    run = tune(cluster, "rounds", scheduler="none", parallel=2, retries=9, fresh=True, config={"round_s": 0.05})
    client = cluster.client()
    for count in (5, 20):
        wait_until(lambda count=count: rounds_so_far(client, run) >= count, f"{count} rounds")  # type: ignore[misc]
        for pid in live_worker_pids(cluster, run)[:1]:
            children = (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()
            os.kill(int(children[0]) if children and count == 5 else pid, signal.SIGKILL)
    assert ended(cluster, run).status == "succeeded"
    assert curves(cluster, run) == undisturbed["rounds"]


def test_leaving_the_interpreter_ends_the_trial_alone(cluster: LiveCluster) -> None:
    run = tune(cluster, "exits", parallel=1, scheduler="none")
    assert ended(cluster, run).status == "succeeded"
    for trial in trials(cluster, run):
        wrong = float(trial.values["x"]) > 0.5  # type: ignore[arg-type]
        assert trial.status == ("failed" if wrong else "finished")
        assert not wrong or (trial.failure is not None and "this will not do" in trial.failure.message)


def test_a_function_that_comes_back_in_two_processes_is_one_trial(cluster: LiveCluster) -> None:
    run = tune(cluster, "forks", parallel=2)
    assert ended(cluster, run).status == "succeeded"
    assert [(trial.status, trial.rounds) for trial in trials(cluster, run)] == [("finished", 1)] * 5
    assert len(cluster.client().reports(run).reports) == 5


def test_ten_thousand_reports_of_one_trial_are_all_kept(cluster: LiveCluster) -> None:
    run = tune(cluster, "many", trials=1, scheduler="none", config={"reports": 10_000})
    assert ended(cluster, run).status == "succeeded"
    client = cluster.client()
    (trial,) = trials(cluster, run)
    assert trial.rounds == 10_000
    after, found = 0, []
    while batch := client.reports(run, after):
        if not batch.reports:
            break
        found += [report.step for report in batch.reports]
        after = batch.next
    assert found == list(range(10_000))


def test_the_same_function_runs_alone(cluster: LiveCluster) -> None:
    done = cluster.cli("train", "trials.py:rounds", "--config", "x=0.25")
    assert done.returncode == 0, done.stderr


def test_a_study_goes_on_after_its_cluster_was_taken_down(fresh_cluster: LiveCluster, undisturbed: Any) -> None:
    fresh_cluster.up()
    run = tune(fresh_cluster, "steps", scheduler="none", parallel=2, config={"round_s": 0.05})
    client = fresh_cluster.client()
    wait_until(lambda: rounds_so_far(client, run) >= 10, "ten rounds")
    assert fresh_cluster.cli("down").returncode == 0
    fresh_cluster.up()
    assert ended(fresh_cluster, run).status == "succeeded"
    assert curves(fresh_cluster, run) == undisturbed["steps"]


def test_trials_share_devices_where_that_was_asked_for(cluster: LiveCluster, undisturbed: Any) -> None:
    run = tune(cluster, "rounds", scheduler="none", parallel=3, devices="cpu:0.5", config={"round_s": 0.05})
    client = cluster.client()
    wait_until(lambda: len(live_worker_pids(cluster, run)) == 3, "three workers")
    workers = [worker for worker in client.run(run).workers if worker.status == "ready"]
    assert sorted(worker.devices for worker in workers)[0:2] == [workers[0].devices] * 2
    assert len({worker.devices for worker in workers}) == 2
    assert ended(cluster, run).status == "succeeded"
    assert curves(cluster, run) == undisturbed["rounds"]
