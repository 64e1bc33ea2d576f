"""The first minutes of a newcomer, for real."""

import json

import pytest
from live_cluster import SCRIPTS, LiveCluster, steps_of, wait_until

pytestmark = pytest.mark.e2e


def test_a_command_runs_and_its_output_is_on_stdout(cluster: LiveCluster) -> None:
    done = cluster.cli("run", "--", "echo", "hi")
    assert (done.returncode, done.stdout) == (0, "hi\n"), done.stderr


def test_a_failing_command_fails_the_cli_with_its_code_named(cluster: LiveCluster) -> None:
    done = cluster.cli("run", "--", "sh", "-c", "echo to-stderr >&2; exit 3")
    assert done.returncode == 1
    assert "to-stderr" in done.stderr
    assert "worker-exited" in done.stderr and "3" in done.stderr


def test_a_script_and_a_function_train(cluster: LiveCluster) -> None:
    assert "hello from a worker" in cluster.cli("train", "hello.py").stdout
    done = cluster.cli("train", "tiny.py:train", "--config", "steps=3")
    assert done.returncode == 0, done.stderr
    assert "hash " in done.stdout


def test_a_torchrun_script_runs_unchanged(cluster: LiveCluster) -> None:
    done = cluster.cli("train", "torchrun_script.py", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2 sees 3" in done.stdout and "rank 1 of 2 sees 3" in done.stdout


def test_a_rendezvous_left_in_the_environment_is_not_picked_up(fresh_cluster: LiveCluster) -> None:
    """accelerate#2362, #2818: a wrong address or process count from elsewhere is taken silently."""
    stale = {"WORLD_SIZE": "9", "RANK": "7", "MASTER_ADDR": "192.0.2.9", "MASTER_PORT": "1"}
    fresh_cluster.environment |= stale
    done = fresh_cluster.cli("train", "torchrun_script.py", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 sees 3" in done.stdout


def test_ps_show_why_events_and_nodes_answer_in_json(cluster: LiveCluster) -> None:
    cluster.cli("run", "--name", "answered", "--", "true")
    runs = json.loads(cluster.cli("ps", "--all", "-o", "json").stdout)
    run = next(run["id"] for run in runs if run["id"].startswith("answered-"))
    assert json.loads(cluster.cli("show", run, "-o", "json").stdout)["status"] == "succeeded"
    assert json.loads(cluster.cli("why", run, "-o", "json").stdout)["code"]
    events = [json.loads(line) for line in cluster.cli("events", run, "-o", "json").stdout.splitlines()]
    kinds = [event["event"]["event"] for event in events]
    assert kinds[0] == "RunSubmitted" and kinds[-1] == "RunEnded"
    assert json.loads(cluster.cli("nodes", "-o", "json").stdout)[0]["node"]["status"] == "up"


def test_outputs_come_back_with_get(cluster: LiveCluster, tmp_path) -> None:
    done = cluster.cli(
        "run", "--name", "leaves", "-o", "json", "--", "sh", "-c", 'echo 42 > "$RACIMO_OUTPUT_DIR/answer"'
    )
    assert done.returncode == 0, done.stderr
    run = json.loads(cluster.cli("ps", "--all", "-o", "json").stdout)[0]["id"]
    assert "answer" in cluster.cli("get", run).stdout
    assert cluster.cli("get", run, "answer", cwd=tmp_path).returncode == 0
    assert (tmp_path / "answer").read_text() == "42\n"


def test_a_secret_reaches_the_worker_and_no_log(cluster: LiveCluster) -> None:
    import subprocess
    import sys

    subprocess.run(
        [sys.executable, "-m", "racimo.cli.main", "secret", "set", "API_KEY"],
        input=b"tiger-in-the-tank",
        env=cluster.environment,
        check=True,
    )
    script = 'echo "key=$API_KEY"; test ${#API_KEY} = 17'
    done = cluster.cli("run", "--secret", "API_KEY", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "key=***\n"
    journal = b"".join(path.read_bytes() for path in cluster.home.journal_file.parent.glob("journal*"))
    assert b"tiger-in-the-tank" not in journal


def test_stop_ends_a_run_and_everything_it_started(cluster: LiveCluster) -> None:
    done = cluster.cli("run", "--detach", "--name", "sleeper", "--", "sh", "-c", "sleep 1000 & sleep 1000")
    run = done.stdout.split()[0]
    wait_until(lambda: any("sleep 1000" in command for command in cluster.pids().values()), "the command is running")
    assert cluster.cli("stop", run).returncode == 0
    wait_until(lambda: not any("sleep 1000" in command for command in cluster.pids().values()), "the command is gone")
    assert json.loads(cluster.cli("show", run, "-o", "json").stdout)["status"] == "stopped"


def test_up_again_says_so_and_changes_nothing(cluster: LiveCluster) -> None:
    before = cluster.service_pid("supervisor")
    assert cluster.cli("up").returncode == 0
    assert cluster.service_pid("supervisor") == before


def test_two_clusters_on_one_machine_do_not_disturb_each_other(
    cluster: LiveCluster, fresh_cluster: LiveCluster
) -> None:
    fresh_cluster.up()
    assert fresh_cluster.cli("run", "--", "echo", "second").stdout == "second\n"
    assert fresh_cluster.cli("down").returncode == 0
    assert cluster.cli("run", "--", "echo", "first").stdout == "first\n"


def test_a_client_that_finds_no_cluster_starts_one(fresh_cluster: LiveCluster) -> None:
    done = fresh_cluster.cli("run", "--", "echo", "hi")
    assert (done.returncode, done.stdout) == (0, "hi\n"), done.stderr
    assert SCRIPTS.exists()


def test_down_keeps_the_queue_and_exact_training_for_the_next_up(fresh_cluster: LiveCluster) -> None:
    fresh_cluster.up()
    words = ("train", "tiny.py:train", "--detach", "--workers", "2", "--config", "steps=60", "--config", "pause_s=0.03")
    training = fresh_cluster.cli(*words).stdout.split()[0]
    filler = fresh_cluster.cli("run", "--workers", "2", "--detach", "--", "sleep", "300").stdout.split()[0]
    waiting = fresh_cluster.cli("run", "--detach", "--", "true").stdout.split()[0]
    client = fresh_cluster.client()
    wait_until(lambda: (progress := client.run(training).progress) and progress.step >= 5, "some steps")
    down = fresh_cluster.cli("down")
    assert down.returncode == 0 and filler in down.stderr and training in down.stderr, down.stderr
    assert not fresh_cluster.pids()
    fresh_cluster.up()
    client = fresh_cluster.client()
    assert client.wait(waiting, timeout_s=30).status == "succeeded"
    assert client.wait(training, timeout_s=30).status == "succeeded"
    assert client.run(filler).status == "stopped"
    steps = [line["step"] for line in steps_of(fresh_cluster, training)]
    assert len(set(steps)) == 60 and len(steps) <= 2 * 60, "no step is done again, each worker notes each once"
