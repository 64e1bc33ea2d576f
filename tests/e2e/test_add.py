"""`racimo add` through a real sshd: a host that has nothing but Python becomes a node; others say what they lack."""

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from live_cluster import LiveCluster, wait_until
from sshd import SSHD, Sshd
from test_joining import Head

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason="no ssh or sshd on this machine"),
]

HERE = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONPATH": sysconfig.get_paths()["purelib"]}
"""On the "other" machine: what Racimo requires is there already, and nothing is fetched from anywhere."""


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    made = Sshd(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    made = Head(tmp_path / "head", slots=1)
    made.bind()
    yield made
    assert made.cli("down").returncode == 0


def add(head: Head, sshd: Sshd, *hosts: str) -> tuple[int, dict[str, dict], str]:
    words = ("add", *hosts, "--slots", "2", "--ssh-config", str(sshd.client_config), "-o", "json")
    done = head.cli(*words, timeout_s=110)
    return done.returncode, {added["host"]: added for added in json.loads(done.stdout or "[]")}, done.stderr


def only_an_old_python(folder: Path) -> Path:
    folder.mkdir()
    for name in ("sh", "env", "cat"):
        (folder / name).symlink_to(shutil.which(name) or name)
    python = folder / "python3"
    python.write_text("#!/bin/sh\necho 3.7\n")
    python.chmod(0o755)
    return folder


def test_hosts_become_nodes_or_say_why_not_each_for_itself(head: Head, sshd: Sshd, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    home = sshd.add_host("fresh", PATH=path, **HERE)
    sshd.add_host("stranger")
    sshd.add_host("old", PATH=str(only_an_old_python(tmp_path / "bin")))
    there = LiveCluster(home / ".racimo", slots=2)
    with ExitStack() as undo:
        undo.callback(lambda: wait_until(lambda: not there.pids(), f"no process left: {there.pids()}", 20))
        undo.callback(lambda: there.home.root.exists() and there.cli("down", "--now"))
        code, added, errors = add(head, sshd, "fresh", "stranger", "locked", "old", "gone@fresh")
        assert code == 1, errors
        node = added["fresh"].get("node")
        assert node is not None, errors
        assert [len(node["devices"]), head.node_states()[node["id"]]] == [2, "up"]
        by_hand = f"ssh -F {sshd.client_config}"
        for host, words in (
            ("stranger", "host key is unknown here"),
            ("locked", "asks for a password, or takes none of your keys"),
            ("gone@fresh", "takes none of your keys"),
        ):
            error = added[host]["error"]
            assert error["code"] == "ssh-failed" and words in error["message"], error
            assert error["hint"].startswith(f"{by_hand} {host} true"), error
        old = added["old"]["error"]
        assert old["code"] == "version-mismatch" and "seen there: 3.7 " in old["message"], old
        assert head.token.partition(":")[0] not in errors
        assert (home / ".racimo" / "venv" / "racimo.parcel").exists()
        again = subprocess.run(
            [sys.executable, "-m", "racimo.cli.main", "add", "fresh", "--ssh-config", str(sshd.client_config)],
            env=head.environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert again.returncode == 0, again.stderr
        assert "installing" not in again.stderr and "is a node of this cluster already" in again.stdout


def test_a_cluster_that_nobody_can_reach_adds_nobody(fresh_cluster: LiveCluster) -> None:
    fresh_cluster.up()
    done = fresh_cluster.cli("add", "somewhere")
    assert done.returncode == 2 and "[wrong-state]" in done.stderr and "racimo up --bind IP" in done.stderr
