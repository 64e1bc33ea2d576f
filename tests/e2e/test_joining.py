"""A machine joins another's cluster and leaves it, through the command line; here both are this machine, at two of its
loopback addresses."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from socket import socket

import pytest
from live_cluster import SCRIPTS, LiveCluster, wait_until

from racimo.act import guardian
from racimo.spec.errors import ExitCode

pytestmark = pytest.mark.e2e

HEAD_IP = "127.0.0.2"
"""Unlike the address that a node here shows (127.0.0.1): a host joins once."""


def free_port() -> int:
    with socket() as probe:
        probe.bind((HEAD_IP, 0))
        return int(probe.getsockname()[1])


def typed(cluster: LiveCluster, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "racimo.cli.main", *words],
        env=cluster.environment,
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
        timeout=60,
        input=stdin,
    )


class Head(LiveCluster):
    """A cluster that others can join: `line` is what its `up` printed, `token` what is in it."""

    def bind(self) -> None:
        self.address = f"{HEAD_IP}:{free_port()}"
        done = self.cli("up", "--slots", str(self.slots), "--bind", self.address, "--carrier", "link")
        assert done.returncode == 0, done.stderr
        self.line = done.stdout.strip()
        self.token = self.line.split()[1]

    def node_states(self) -> dict[str, str]:
        views = json.loads(self.cli("nodes", "-o", "json").stdout or "[]")
        return {view["node"]["id"]: view["node"].get("status", "up") for view in views}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    made = Head(tmp_path_factory.mktemp("head") / "home", slots=1)
    made.bind()
    yield made
    assert made.cli("down").returncode == 0
    wait_until(lambda: not made.pids(), f"no process left: {made.pids()}", 15)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LiveCluster]:
    made = LiveCluster(tmp_path / "node", slots=2)
    with ExitStack() as undo:
        undo.callback(lambda: wait_until(lambda: not made.pids(), f"no process left: {made.pids()}", 15))
        undo.callback(lambda: made.home.root.exists() and made.cli("down", "--now"))
        yield made


def join(head: Head, node: LiveCluster, *words: str, name: str = "second") -> subprocess.CompletedProcess[str]:
    options = ("--slots", str(node.slots), "--name", name, *words)
    return typed(node, "join", head.address, "--token-file", "-", *options, stdin=head.token)


def test_up_bind_prints_the_one_line_to_paste_and_nothing_else_on_stdout(head: Head) -> None:
    assert head.line.count("\n") == 0
    assert head.line == f"echo {head.token} | racimo join {head.address} --token-file -"
    again = json.loads(head.cli("up", "-o", "json").stdout)
    assert again["join"] == head.line
    assert head.home.token_file.read_text() == head.token.partition(":")[0]


def test_a_cluster_is_bound_while_work_runs_and_the_work_goes_on(fresh_cluster: LiveCluster) -> None:
    """Growing from one machine to many needs no restart of anything but the two services."""
    fresh_cluster.up()
    run = fresh_cluster.cli("run", "--no-files", "--detach", "--", "sleep", "600").stdout.split()[0]
    wait_until(lambda: fresh_cluster.client().run(run).workers[0].pid, "it runs")
    before = fresh_cluster.client().run(run).workers[0]
    address = fresh_cluster.home.cluster_file.read_bytes()
    done = fresh_cluster.cli("up", "--bind", f"{HEAD_IP}:{free_port()}", "--carrier", "link")
    assert done.returncode == 0, done.stderr
    assert fresh_cluster.client().run(run).workers[0] == before and Path(f"/proc/{before.pid}").exists()
    assert fresh_cluster.home.cluster_file.read_bytes() == address
    assert fresh_cluster.client().nodes()[0].node.address == HEAD_IP


def test_join_work_there_and_leave(head: Head, node: LiveCluster) -> None:
    done = join(head, node)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "second  2 cpu\n"
    assert head.node_states()["second"] == "up"
    there = typed(node, "run", "--no-files", "--workers", "2", "--", "sh", "-c", "echo there")
    assert there.returncode == 0, there.stderr  # two devices: only the new node has them
    twice = join(head, node)
    assert twice.returncode == ExitCode.UNREACHABLE and "this cluster already" in twice.stderr
    left = node.cli("down")
    assert left.returncode == 0, left.stderr
    assert "second" not in head.node_states()
    assert not node.pids()
    assert not (node.home.join_file.exists() or node.home.token_file.exists() or node.home.cluster_file.exists())
    assert join(head, node).returncode == 0, "a node that left may come again"


def test_what_cannot_join_is_told_why_and_leaves_nothing(head: Head, node: LiveCluster) -> None:
    secret, pin = head.token.split(":")
    for token, address, code, words in (
        ("another:" + pin, head.address, "unauthorized", "does not accept this token"),
        (f"{secret}:{'0' * 64}", head.address, "certificate-mismatch", "another certificate"),
        (secret, head.address, "unauthorized", "no certificate's pin"),
        (head.token, f"{HEAD_IP}:{free_port()}", "unreachable", f"answers at {HEAD_IP}"),
        ("two words", head.address, "unauthorized", "not a token"),
    ):
        done = typed(node, "join", address, "--token-file", "-", "-o", "json", stdin=token)
        error = json.loads(done.stderr.splitlines()[-1])
        assert (done.returncode, error["code"]) == (ExitCode.UNREACHABLE, code), done.stderr
        assert words in error["message"] and error["hint"]
        assert not node.home.root.exists() and not node.pids()
    at_head = typed(head, "join", head.address, "--token-file", "-", stdin=head.token)
    assert "is the head of a running cluster" in at_head.stderr and at_head.returncode == ExitCode.UNREACHABLE


def test_ctrl_c_while_joining_leaves_nothing_behind(head: Head, node: LiveCluster) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "racimo.cli.main", "join", head.address, "--token-file", "-", "--name", "brief"],
        env=node.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdin is not None
    process.stdin.write(head.token + "\n")
    process.stdin.flush()
    wait_until(lambda: (node.home.processes_dir / "supervisor.json").exists(), "it has started something")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    if process.returncode == 0:
        pytest.skip("it had joined before it could be interrupted")
    assert process.returncode == ExitCode.INTERRUPTED, errors
    assert not node.home.root.exists()
    wait_until(lambda: not node.pids(), f"no process left: {node.pids()}", 10)


def test_the_services_of_a_node_repair_each_other_one_by_one_and_in_pairs(head: Head, node: LiveCluster) -> None:
    assert join(head, node).returncode == 0
    for roles in (("agent",), ("supervisor",), ("watch",), ("supervisor", "agent"), ("supervisor", "watch")):
        before = {role: node.service_pid(role) for role in ("supervisor", "agent", "watch")}
        for role in roles:
            os.kill(before[role], signal.SIGSTOP)  # so that none of them sees another one die first
        for role in roles:
            os.kill(before[role], signal.SIGKILL)
        for role in roles:
            wait_until(partial(other_lives, node, role, before[role]), f"a new {role} after {roles}", 10)
    wait_until(lambda: head.node_states()["second"] == "up", "the node is up", 15)


def other_lives(node: LiveCluster, role: str, old: int) -> bool:
    record = guardian.read_live(node.home.root, role)
    return record is not None and record.pid != old


def test_a_client_elsewhere_needs_the_address_and_the_token_with_its_pin(head: Head, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(head.token)
    elsewhere = LiveCluster(tmp_path / "nothing", slots=0)
    elsewhere.environment |= {"RACIMO_ADDRESS": f"https://{head.address}", "RACIMO_TOKEN_FILE": str(token_file)}
    done = elsewhere.cli("run", "--no-files", "--", "echo", "from afar")
    assert (done.returncode, done.stdout) == (0, "from afar\n"), done.stderr
    token_file.write_text(f"{head.token.partition(':')[0]}:{'1' * 64}")
    refused = elsewhere.cli("ps")
    assert refused.returncode == ExitCode.UNREACHABLE and "[certificate-mismatch]" in refused.stderr
    assert not elsewhere.home.root.exists()


def test_a_head_that_died_is_waited_for_and_taken_up_again_from_a_backup(node: LiveCluster, tmp_path: Path) -> None:
    """All processes of the head are killed and its disk is lost: agents come back to what the backup made again."""
    head = Head(tmp_path / "head", slots=1)
    head.bind()
    with ExitStack() as undo:
        undo.callback(lambda: head.cli("down"))
        assert join(head, node).returncode == 0
        run = typed(node, "run", "--no-files", "--detach", "--workers", "2", "--", "sleep", "600").stdout.split()[0]
        wait_until(lambda: all(worker.pid for worker in head.client().run(run).workers), "both workers run")
        pids = {worker.pid for worker in head.client().run(run).workers}
        backup = tmp_path / "backup.tar"
        assert head.cli("backup", str(backup)).returncode == 0
        assert backup.stat().st_mode & 0o777 == 0o600
        head.kill_everything()
        waiting = subprocess.Popen(
            [sys.executable, "-m", "racimo.cli.main", "ps", "-o", "json"],
            env=node.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert waiting.stderr is not None
        assert f"waiting for the head at {head.address} (since " in waiting.stderr.readline()
        head.home.root.rename(tmp_path / "lost")
        done = head.cli("up", "--from-backup", str(backup))
        assert done.returncode == 0, done.stderr
        assert head.line in done.stdout, "the same token and certificate"
        shown, _ = waiting.communicate(timeout=40)
        assert [view["id"] for view in json.loads(shown)] == [run]
        wait_until(lambda: head.node_states().get("second") == "up", "the node is back", 20)
        assert {worker.pid for worker in head.client().run(run).workers} == pids, "its work was never touched"
        refused = head.cli("up", "--from-backup", str(backup))
        assert "holds a cluster already" in refused.stderr and refused.returncode == ExitCode.USAGE


def test_a_node_is_up_again_without_a_token_after_its_machine_was_off(head: Head, node: LiveCluster) -> None:
    assert join(head, node).returncode == 0
    node.kill_everything()
    wait_until(lambda: head.node_states()["second"] == "silent", "the head notices")
    done = node.cli("up", "--slots", "3", "--price", "0.5")
    assert done.returncode == 0, done.stderr
    assert head.node_states()["second"] == "up"
    now = next(view.node for view in head.client().nodes() if view.node.id == "second")
    assert (len(now.devices), now.price_per_device_hour) == (3, 0.5)
