"""Client and command line through the real thing: streams that survive kills, Ctrl-C, starting and ending clusters."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live_cluster import LiveCluster, wait_until

from racimo.client import Client
from racimo.client.ending import down, service_records
from racimo.spec.errors import RacimoError
from racimo.spec.run import RunSpec

pytestmark = pytest.mark.e2e

COUNTING = "for i in $(seq 1 40); do echo line $i; sleep 0.05; done"


def start(cluster: LiveCluster, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "racimo.cli.main", *words],
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs its jobs in the background makes them ignore SIGINT, and a process inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_following_survives_a_kill_of_the_control_process_without_a_line_lost_or_doubled(cluster: LiveCluster) -> None:
    following = start(cluster, "run", "--no-files", "--", "sh", "-c", COUNTING)
    assert following.stdout is not None
    first = following.stdout.readline()
    cluster.kill(cluster.service_pid("control"))
    rest, errors = following.communicate(timeout=60)
    assert (first + rest).splitlines() == [f"line {number}" for number in range(1, 41)], errors
    assert following.returncode == 0


def test_a_tail_survives_it_too(cluster: LiveCluster) -> None:
    run = cluster.cli("run", "--no-files", "--detach", "--", "sh", "-c", COUNTING).stdout.strip()
    wait_until(lambda: "line 5\n" in cluster.cli("logs", run).stdout, "some lines are there")
    following = start(cluster, "logs", "-f", "--tail", "2", run)
    assert following.stdout is not None
    shown = [following.stdout.readline() for _ in range(3)]
    cluster.kill(cluster.service_pid("control"))
    rest, _ = following.communicate(timeout=60)
    numbers = [int(line.split()[1]) for line in ("".join(shown) + rest).splitlines()]
    assert numbers == list(range(numbers[0], 41))


def test_a_submit_during_a_restart_of_the_control_process_is_one_run(cluster: LiveCluster) -> None:
    before = len(json.loads(cluster.cli("ps", "--all", "-o", "json").stdout))
    cluster.kill(cluster.service_pid("control"))
    done = cluster.cli("run", "--no-files", "--", "echo", "once")
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr
    assert len(json.loads(cluster.cli("ps", "--all", "-o", "json").stdout)) == before + 1


def test_ctrl_c_leaves_the_run_alone_and_says_how_to_come_back(cluster: LiveCluster) -> None:
    """skypilot#402, skypilot#756; ray#31451: Ctrl-C leaves processes held (here: on purpose, and says so)."""
    following = start(cluster, "run", "--no-files", "--", "sh", "-c", "echo begun; sleep 2; echo done")
    assert following.stdout is not None and following.stdout.readline() == "begun\n"
    following.send_signal(signal.SIGINT)
    _, errors = following.communicate(timeout=20)
    assert following.returncode == 130
    come_back = next(line for line in errors.splitlines() if "come back:" in line)
    words = come_back.split("racimo ")[1].split()
    done = cluster.cli(*words)
    assert done.stdout == "begun\ndone\n"


def test_a_waiting_run_says_why_while_it_waits(cluster: LiveCluster) -> None:
    """ray#34816: a request that cannot start now hangs in silence."""
    holder = cluster.cli("run", "--no-files", "--workers", "4", "--detach", "--", "sleep", "60").stdout.strip()
    waiting = start(cluster, "run", "--no-files", "--", "echo", "at last")
    assert waiting.stderr is not None
    said = ""
    while holder not in said:
        said = waiting.stderr.readline()
        assert said, "the command ended without saying why it waited"
    assert "waits" in said
    cluster.cli("stop", holder)
    assert waiting.communicate(timeout=60)[0] == "at last\n"


def test_exec_runs_beside_a_worker_and_passes_its_failure_on(cluster: LiveCluster) -> None:
    run = cluster.cli("run", "--detach", "--variable", "A=b", "--", "sleep", "60").stdout.strip()
    wait_until(lambda: cluster.client().run(run).workers[0].pid, "the worker is there")
    beside = cluster.cli("exec", run, "--", "sh", "-c", "echo $A; ls")
    assert beside.returncode == 0 and beside.stdout.splitlines()[0] == "b" and "hello.py" in beside.stdout
    failed = cluster.cli("exec", run, "--", "sh", "-c", "exit 7")
    assert failed.returncode == 7 and "exit code 7" in failed.stderr
    cluster.cli("stop", run)


def test_the_python_client_does_what_the_command_line_does(cluster: LiveCluster, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("echo from the file > $RACIMO_OUTPUT_DIR/result")
    with Client(home=cluster.home.root, may_start=False) as client:
        view = client.submit(RunSpec(command=("sh", "job.sh")), tmp_path)
        assert client.wait(view.id, timeout_s=30).status == "succeeded"
        assert client.download(view.id, "result", tmp_path / "back").read_text() == "from the file\n"
        assert [output.path for output in client.outputs(view.id)] == ["result"]
        assert client.why(view.id).code


def test_check_finds_nothing_wrong_here(cluster: LiveCluster) -> None:
    done = cluster.cli("check", "-o", "json")
    wrong = [finding for finding in json.loads(done.stdout) if finding["verdict"] == "wrong"]
    assert done.returncode == 0, wrong


def test_several_ups_at_once_make_one_cluster(fresh_cluster: LiveCluster) -> None:
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: fresh_cluster.cli("up"), range(3)))
    assert [one.returncode for one in done] == [0, 0, 0], [one.stderr for one in done]
    assert sum("racimo.control.supervisor" in command for command in fresh_cluster.pids().values()) == 1
    refused = fresh_cluster.cli("up", "--slots", "7")
    assert refused.returncode == 2 and "racimo down && racimo up --slots 7" in refused.stderr


def test_a_new_price_takes_effect_at_once_and_running_work_goes_on(fresh_cluster: LiveCluster) -> None:
    fresh_cluster.up()
    run = fresh_cluster.cli("run", "--detach", "--no-files", "--", "sleep", "1000").stdout.strip()
    client = fresh_cluster.client()
    wait_until(lambda: client.run(run).workers and client.run(run).workers[0].pid, "it runs")
    pid = client.run(run).workers[0].pid
    done = fresh_cluster.cli("up", "--price", "2.5")
    assert done.returncode == 0 and "price per device-hour: 2.5" in done.stdout, done.stderr
    view = client.run(run)
    assert view.price_known and (view.status, view.workers[0].pid) == ("running", pid)
    assert fresh_cluster.cli("stop", run).returncode == 0
    assert client.wait(run, timeout_s=30).status == "stopped"


def test_down_ends_everything_even_where_nobody_answers(fresh_cluster: LiveCluster) -> None:
    """ray#31451, ray#32725: processes left behind."""
    fresh_cluster.up()
    run = fresh_cluster.cli("run", "--detach", "--no-files", "--", "sleep", "1000")
    assert run.returncode == 0
    wait_until(lambda: any("sleep 1000" in command for command in fresh_cluster.pids().values()), "it runs")
    for pid in [fresh_cluster.service_pid(role) for role in ("supervisor", "control", "agent")]:
        os.kill(pid, signal.SIGSTOP)  # stopped ones cannot start each other again
    for role in ("supervisor", "control", "agent"):
        fresh_cluster.kill(fresh_cluster.service_pid(role))
    done = fresh_cluster.cli("down")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not fresh_cluster.pids(), "no process is left", 10)
    assert fresh_cluster.cli("up").returncode == 0, "the home is fit for another start"


def test_down_where_nothing_is_up_says_so(fresh_cluster: LiveCluster) -> None:
    done = fresh_cluster.cli("down")
    assert done.returncode == 0 and "no cluster was up" in done.stderr
    assert not down(fresh_cluster.home, say=print)
    assert service_records(fresh_cluster.home) == []


def test_a_start_that_fails_shows_the_log_and_leaves_nothing(fresh_cluster: LiveCluster) -> None:
    fresh_cluster.home.journal_file.mkdir(parents=True)
    fresh_cluster.home.root.chmod(0o700)
    done = fresh_cluster.cli("up")
    assert done.returncode == 3, done.stderr
    assert "start-failed" in done.stderr and "control.log" in done.stderr and "journal" in done.stderr
    wait_until(lambda: not fresh_cluster.pids(), "no process is left", 10)


def test_a_home_that_others_can_write_to_is_refused(fresh_cluster: LiveCluster) -> None:
    fresh_cluster.home.root.mkdir(mode=0o700)
    fresh_cluster.home.root.chmod(0o777)
    done = fresh_cluster.cli("up")
    assert done.returncode == 3 and "home-not-private" in done.stderr and "chmod 700" in done.stderr
    with pytest.raises(RacimoError, match="other users can write"):
        Client(home=fresh_cluster.home.root, say=print).nodes()
    assert not fresh_cluster.pids()
