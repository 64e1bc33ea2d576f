"""kill -9 of every service process, for real, with a command and a training run in flight."""

import json
import os
import time
from pathlib import Path

import pytest
from live_cluster import LiveCluster, committed, final_hash, live_worker_pids, steps_of, submit, wait_until

from racimo.spec.run import RunSpec

pytestmark = pytest.mark.e2e
ROLES = ("control", "agent", "zygote-plain", "zygote-torch", "supervisor")


@pytest.fixture(scope="module")
def undisturbed(cluster: LiveCluster) -> str:
    return final_hash(cluster, submit(cluster, "--config", "steps=80"))


def revived(cluster: LiveCluster, role: str, old_pid: int) -> bool:
    try:
        pid = cluster.service_pid(role)
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return pid != old_pid and Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("role", ROLES)
def test_any_service_may_be_killed_while_work_runs(cluster: LiveCluster, undisturbed: str, role: str) -> None:
    training = submit(cluster, "--config", "steps=80", "--config", "pause_s=0.03", "--workers", "2")
    script = 'echo begin >> "$RACIMO_OUTPUT_DIR/times"; sleep 2; echo end >> "$RACIMO_OUTPUT_DIR/times"; exit 7'
    command = cluster.cli("run", "--detach", "--", "sh", "-c", script).stdout.split()[0]
    times = cluster.home.output_dir(command) / "times"
    wait_until(lambda: committed(cluster, training) >= 10 and times.exists(), "both are running")

    old_pid = cluster.service_pid(role)
    cluster.kill(old_pid)
    wait_until(lambda: revived(cluster, role, old_pid), f"a new {role}", 10)

    view = cluster.client().wait(command, timeout_s=30)
    assert view.status == "failed" and view.failure is not None and "7" in view.failure.message
    assert times.read_text() == "begin\nend\n", "ran once, to its end"
    assert final_hash(cluster, training) == undisturbed
    assert all(node.num_free == len(node.node.devices) for node in cluster.client().nodes())
    assert cluster.cli("run", "--", "echo", "still here").stdout == "still here\n"


def test_training_goes_on_while_the_control_process_is_down(cluster: LiveCluster, undisturbed: str) -> None:
    """The supervisor is stopped first, so the control process stays down for as long as we look."""
    import signal

    training = submit(cluster, "--config", "steps=80", "--config", "pause_s=0.05", "--workers", "2")
    wait_until(lambda: committed(cluster, training) >= 5, "some steps")
    supervisor, control = cluster.service_pid("supervisor"), cluster.service_pid("control")
    os.kill(supervisor, signal.SIGSTOP)
    try:
        cluster.kill(control)
        died_at = time.monotonic()
        wait_until(
            lambda: sum(line["t"] > died_at + 1.0 for line in steps_of(cluster, training)) >= 2,
            "steps committed one second and more after the control process died",
            10,
        )
    finally:
        os.kill(supervisor, signal.SIGCONT)
    assert final_hash(cluster, training) == undisturbed


def test_a_worker_that_dies_while_control_is_down_is_replaced_within_four_seconds(
    cluster: LiveCluster, undisturbed: str
) -> None:
    training = submit(cluster, "--config", "steps=80", "--config", "pause_s=0.05", "--workers", "2")
    wait_until(lambda: committed(cluster, training) >= 5, "some steps")
    victim = live_worker_pids(cluster, training)[1]
    cluster.kill(cluster.service_pid("control"))
    cluster.kill(victim)
    killed_at = time.monotonic()
    wait_until(lambda: any(line["t"] > killed_at and line["generation"] >= 3 for line in steps_of(cluster, training)),
               "a step committed by a generation with the replacement", 4)  # fmt: skip
    assert final_hash(cluster, training) == undisturbed


def test_everything_killed_at_once_comes_back_with_up(fresh_cluster: LiveCluster) -> None:
    fresh_cluster.up()
    script = 'echo begin >> "$RACIMO_OUTPUT_DIR/times"; sleep 30; exit 0'
    run = fresh_cluster.cli("run", "--detach", "--name", "kept", "--", "sh", "-c", script).stdout.split()[0]
    times = fresh_cluster.home.output_dir(run) / "times"
    # One that was planned and never began would rightly be begun at the next start.
    wait_until(times.exists, "the command runs")
    fresh_cluster.kill_everything()
    fresh_cluster.up()
    view = fresh_cluster.client().wait(run, timeout_s=30)
    assert times.read_text() == "begin\n", "an unknown end is not a reason to run it twice"
    assert view.status == "lost" and view.failure is not None and view.failure.code == "worker-lost"
    assert fresh_cluster.cli("run", "--", "echo", "back").stdout == "back\n"


def test_a_torn_journal_is_cut_and_said(fresh_cluster: LiveCluster) -> None:
    fresh_cluster.up()
    client = fresh_cluster.client()
    runs = [client.submit(RunSpec(command=("true",), files="")).id for _ in range(40)]
    assert all(client.wait(run, timeout_s=30).status == "succeeded" for run in runs[-4:])
    assert fresh_cluster.cli("down").returncode == 0
    journal = fresh_cluster.home.journal_file
    os.truncate(journal, journal.stat().st_size * 2 // 3)
    up = fresh_cluster.cli("up")
    assert up.returncode == 0, up.stderr
    warnings = fresh_cluster.client().cluster().warnings
    assert any("torn" in warning or "cut" in warning for warning in warnings), warnings
    assert fresh_cluster.cli("run", "--name", "later", "--", "echo", "on").stdout == "on\n"
    later = next(run.id for run in fresh_cluster.client().runs(all=True) if run.id.startswith("later-"))
    assert int(later.removeprefix("later-")) > 1000, "a name that the lost records may have given is not given again"


@pytest.mark.parametrize("damage", ["log deleted", "log truncated", "log garbled", "database emptied"])
def test_a_lost_journal_gives_no_name_again_and_says_so(fresh_cluster: LiveCluster, damage: str) -> None:
    """Everything is killed at once, then the journal's files are damaged before the next start."""
    fresh_cluster.up()
    for word in ("one", "two", "three"):
        assert fresh_cluster.cli("run", "--no-files", "--name", "say", "--", "echo", word).stdout == f"{word}\n"
    fresh_cluster.kill_everything()
    database = fresh_cluster.home.journal_file
    log = database.with_name(database.name + "-wal")
    if damage == "log deleted":
        log.unlink()
    elif damage == "log truncated":
        os.truncate(log, log.stat().st_size // 3)
    elif damage == "log garbled":
        log.write_bytes(b"\x55" * 3000 + log.read_bytes()[3000:])
    else:
        os.truncate(database, 0)
    fresh_cluster.up()
    warnings = fresh_cluster.client().cluster().warnings
    assert any("lost" in warning for warning in warnings), warnings
    assert fresh_cluster.cli("run", "--no-files", "--name", "say", "--", "echo", "new").stdout == "new\n"
