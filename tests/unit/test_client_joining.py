"""What is found before a machine joins: everything that would make it a bad node is said, with both sides' numbers."""

import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from racimo.act import tls
from racimo.act.journal_file import SqliteJournal
from racimo.act.versions import own_versions, version_problem
from racimo.agent.runs import newest_run_number
from racimo.client import joining
from racimo.client.discovery import Finder
from racimo.client.joined_home import forget_cluster
from racimo.client.joining import Wish, join
from racimo.client.start import prepare_home
from racimo.control.private_files import write_private
from racimo.control.views import ClusterView, NodeView
from racimo.spec.config import ClusterConfig, JoinConfig, LinkState, Token
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.spec.run import RunSpec
from racimo.state import events as ev
from racimo.state.nouns import Device, Node

TOKEN = Token("secret", "0" * 64)
HEAD = "127.0.0.1:7700"


class Usage(NamedTuple):
    total: int = 10**12
    used: int = 0
    free: int = 10**12


class Stage:
    """A head that answers as the test says; a join that gets as far as starting something has been welcome."""

    def __init__(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = home
        self.cluster = ClusterView(
            id="c-1", version="0.1.0", protocol=2, home="/h", address="http://127.0.0.1:1", started_wall_s=0.0,
            num_devices=1, num_free=1, price_per_device_hour=0.0, num_queued=0, num_running=0, num_ended=0,
            carrier="link", wall_s=time.time(), versions=own_versions(),
        )  # fmt: skip
        self.nodes: list[Node] = []
        self.started = False
        monkeypatch.setattr(tls, "fetch_certificate", lambda address, pin: b"certificate")
        monkeypatch.setattr(joining, "ask", self.ask)
        monkeypatch.setattr(joining, "_start", self.start)
        monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage())

    def ask(self, endpoint: Any, method: str, path: str, kind: Any, *rest: Any, **more: Any) -> Any:
        return self.cluster if kind is ClusterView else [NodeView(node=node, num_free=0) for node in self.nodes]

    def start(self, home: Home, say: Callable[[str], None]) -> None:
        self.started = True

    def join(self, **wish: Any) -> None:
        join(self.home, HEAD, TOKEN, Wish(**wish), lambda text: None)

    def refusal(self, **wish: Any) -> RacimoError:
        before = sorted(self.home.root.rglob("*"))
        with pytest.raises(RacimoError) as caught:
            self.join(**wish)
        assert not self.started and sorted(self.home.root.rglob("*")) == before, "nothing was begun"
        return caught.value


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(Home(tmp_path / "home"), monkeypatch)


def other(**changes: Any) -> Node:
    return msgspec.structs.replace(Node(id="gpu-1", host="gpu", devices=(Device(0),), address="10.0.0.2"), **changes)


def test_a_welcome_machine_writes_who_it_is_and_starts(stage: Stage) -> None:
    stage.join(slots=3, price=0.5, address="127.0.0.1", name="third")
    home = stage.home
    assert stage.started
    assert msgspec.json.decode(home.config_file.read_bytes(), type=ClusterConfig) == ClusterConfig(slots=3, price=0.5)
    joined = msgspec.json.decode(home.join_file.read_bytes(), type=JoinConfig)
    assert joined == JoinConfig(address=HEAD, cluster="c-1", address_of_this_node="127.0.0.1", carrier="link")
    assert (home.node_dir / "id").read_text() == "third"
    for path in (home.token_file, home.join_file, home.config_file, home.certificate_file):
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_home_that_others_can_read_is_made_private(stage: Stage) -> None:
    stage.home.node_dir.mkdir(parents=True)
    for folder in (stage.home.root, stage.home.node_dir):
        folder.chmod(0o755)
    stage.join()
    for folder in (stage.home.root, stage.home.node_dir, stage.home.service_logs_dir):
        assert folder.stat().st_mode & 0o777 == 0o700, folder


@pytest.mark.parametrize(("name", "theirs"), [("python", "3.9.1"), ("torch", "2.1.0")])
def test_another_python_or_torch_is_refused_with_both_versions(stage: Stage, name: str, theirs: str) -> None:
    """Otherwise such a difference shows as something else, late."""
    stage.cluster = msgspec.structs.replace(stage.cluster, versions={**own_versions(), name: theirs})
    error = stage.refusal()
    assert error.code == "version-mismatch" and theirs in error.message and own_versions()[name] in error.message


def test_the_cure_of_another_version_is_of_what_differs(stage: Stage) -> None:
    """pip cannot bring another Python, and only the first two numbers of torch matter."""
    stage.cluster = msgspec.structs.replace(stage.cluster, versions={**own_versions(), "torch": "2.1.7+cu999"})
    assert stage.refusal().hint.startswith("pip install 'torch==2.1.*'")
    stage.cluster = msgspec.structs.replace(stage.cluster, versions={**own_versions(), "python": "3.9.1"})
    assert stage.refusal().hint.startswith("python3.9 -m venv ")


def test_a_difference_of_the_patch_version_or_of_the_build_is_accepted() -> None:
    head = {"python": "3.11.2", "torch": "2.13.0+cpu", "racimo": "0.1.0"}
    assert not version_problem(head, {"python": "3.11.9", "torch": "2.13.1+cu128", "racimo": "0.1.1"})
    assert "no torch" in version_problem(head, {"python": "3.11.9"})


@pytest.mark.parametrize(("ahead_s", "words"), [(-600.0, "behind"), (600.0, "ahead of")])
def test_a_clock_that_is_off_by_minutes_is_refused_with_the_difference(
    stage: Stage, ahead_s: float, words: str
) -> None:
    stage.cluster = msgspec.structs.replace(stage.cluster, wall_s=time.time() - ahead_s)
    error = stage.refusal()
    assert error.code == "clock-off" and f"10m 00s {words} that of the head" in error.message


def test_a_disk_without_room_is_refused_with_the_numbers(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(free=10**8))
    error = stage.refusal()
    assert error.code == "disk-full" and "100 MB" in error.message and "2.0 GB" in error.message


def test_the_same_host_twice_is_refused_unless_a_second_node_is_meant(stage: Stage) -> None:
    stage.nodes = [other(host=socket.gethostname(), address="127.0.0.1")]
    error = stage.refusal()
    assert error.code == "join-refused" and "gpu-1" in error.message and "--name" in error.hint
    stage.join(name="second")
    assert stage.started


def test_a_host_of_the_same_name_elsewhere_is_another_host(stage: Stage) -> None:
    """Cloud images and containers are often all called the same."""
    stage.nodes = [other(host=socket.gethostname(), address="10.0.0.2")]
    stage.join()
    assert stage.started


def test_a_name_that_is_taken_is_refused(stage: Stage) -> None:
    stage.nodes = [other()]
    assert "has a node gpu-1 already" in stage.refusal(name="gpu-1").message
    assert stage.refusal(name="Not A Name").code == "invalid-request"


def test_a_node_keeps_its_name(stage: Stage) -> None:
    """Under another it would be two: one that works and one that is silent for ever."""
    stage.home.node_dir.mkdir(parents=True)
    stage.home.root.chmod(0o700)
    (stage.home.node_dir / "id").write_text("gpu-1")
    stage.nodes = [other(status="silent", host=socket.gethostname())]
    assert "--name gpu-1" in stage.refusal(name="gpu-2").hint
    stage.join(name="gpu-1")
    assert stage.started


def test_a_home_that_another_machine_uses_is_refused(stage: Stage) -> None:
    """A home folder on NFS, or a disk that was copied: two machines with the name of one."""
    stage.home.node_dir.mkdir(parents=True)
    stage.home.root.chmod(0o700)
    (stage.home.node_dir / "id").write_text("gpu-1")
    stage.nodes = [other(host="another-host")]
    error = stage.refusal()
    assert error.code == "join-refused" and "in use there" in error.message


def test_a_copied_home_is_not_told_that_it_is_the_node_whose_name_it_has(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That node is up all right, on the machine that the home was copied from."""
    stage.home.node_dir.mkdir(parents=True)
    asked: list[bool] = []

    def await_node(home: Home, *rest: Any, is_as_asked: Callable[[Node], bool], **more: Any) -> None:
        for state in ("away", "refused", "up"):
            write_private(home.link_file, msgspec.json.encode(LinkState(state=state, since_wall_s=0.0, head=HEAD)))
            asked.append(is_as_asked(other()))
        raise KeyboardInterrupt

    monkeypatch.setattr(joining, "await_node", await_node)
    with pytest.raises(KeyboardInterrupt):
        joining._await(stage.home, None, lambda text: None)
    assert asked == [False, False, True]


def a_former_head(home: Home, *events: ev.Event) -> None:
    home.root.mkdir(mode=0o700)
    journal = SqliteJournal(home.journal_file)
    for seq, event in enumerate(events, 1):
        journal.append(ev.Record(seq=seq, at_s=float(seq), wall_s=0.0, event=event))
    journal.commit()
    journal.close()
    worker_log = home.worker_dir("echo-1/1/0") / "out.log"
    for path in (home.token_file, home.node_dir / "id", home.output_dir("echo-1") / "model.pt", worker_log):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of the head")


def test_a_head_whose_work_is_done_may_join_and_can_be_a_head_again(stage: Stage) -> None:
    home, said = stage.home, []
    a_former_head(home)
    join(home, HEAD, TOKEN, Wish(name="third"), said.append)
    (aside,) = home.root.glob("head-*")
    assert str(aside) in said[-1] and stage.started
    assert Home(aside).journal_file.exists() and Home(aside).token_file.read_text() == "of the head"
    assert (Home(aside).output_dir("echo-1") / "model.pt").exists()
    assert newest_run_number(home) == 0 and home.token_file.read_text() == str(TOKEN)
    forget_cluster(home)
    shutil.copytree(aside, home.root, dirs_exist_ok=True)
    assert home.journal_file.exists() and newest_run_number(home) == 1
    assert (home.node_dir / "id").read_text() == "of the head"


def test_a_head_that_keeps_runs_is_refused_and_one_that_cannot_join_stays_a_head(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(home: Home, say: Any) -> None:
        raise RacimoError("start-failed", "no")

    a_former_head(stage.home)
    before = sorted(stage.home.root.rglob("*"))
    monkeypatch.setattr(joining, "_start", fails)
    with pytest.raises(RacimoError, match="no"):
        stage.join(name="third")
    assert (stage.home.node_dir / "id").read_text() == "of the head"
    kept = [path for path in before if path.suffix not in (".db-wal", ".db-shm")]
    assert set(kept) <= set(stage.home.root.rglob("*")) and stage.home.token_file.read_text() == "of the head"
    shutil.rmtree(stage.home.root)
    a_former_head(stage.home, ev.RunSubmitted(run="echo-1", spec=RunSpec(command=("echo",)), request="", wall_s=0.0))
    with pytest.raises(RacimoError, match="keeps echo-1 for its next up") as caught:
        stage.join()
    assert "racimo stop echo-1 && racimo down" in caught.value.hint and "RACIMO_HOME" in caught.value.hint


def test_a_home_that_was_a_nodes_begins_a_cluster_without_its_runs(stage: Stage) -> None:
    stage.join()
    kept = stage.home.output_dir("echo-6")
    kept.mkdir(parents=True)
    stage.home.worker_dir("echo-6/1/0").mkdir(parents=True)
    forget_cluster(stage.home)
    assert Finder(str, home=stage.home, may_start=False).cure().startswith("racimo join ADDRESS")
    prepare_home(stage.home)
    assert Finder(str, home=stage.home, may_start=False).cure() == "racimo up"
    assert newest_run_number(stage.home) == 0, "the new journal would be said to have lost records"
    assert (stage.home.root / "outputs-c-1" / "echo-6").exists()


def test_a_node_of_another_cluster_is_refused(stage: Stage) -> None:
    stage.home.root.mkdir(mode=0o700)
    stage.home.join_file.write_bytes(msgspec.json.encode(JoinConfig(address="10.0.0.9:7700", cluster="c-9")))
    error = stage.refusal()
    assert error.code == "join-refused" and "that of 10.0.0.9:7700" in error.message and "racimo down" in error.hint


def test_an_address_that_is_not_this_machines_is_refused(stage: Stage) -> None:
    error = stage.refusal(address="10.99.0.1")
    assert error.code == "invalid-request" and "wrong network interface" in error.message


def test_two_joins_at_once_are_one_after_the_other_and_the_second_is_told(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From two homes of one host both would be welcome, and its devices be offered twice."""
    inside, go_on, said = threading.Event(), threading.Event(), []

    def start(home: Home, say: Any) -> None:
        inside.set()
        assert go_on.wait(10)
        stage.nodes = [other(host=socket.gethostname(), address="127.0.0.1")]

    def say(text: str) -> None:
        said.append(text)
        go_on.set()

    monkeypatch.setattr(joining, "_start", start)
    first = threading.Thread(target=stage.join)
    first.start()
    assert inside.wait(10)
    with pytest.raises(RacimoError, match="this host is in the cluster already"):
        join(Home(stage.home.root.with_name("second")), HEAD, TOKEN, Wish(), say)
    first.join()
    assert said == ["waiting for another racimo join on this machine to end"]


def test_a_second_ctrl_c_does_not_cut_the_undoing_short(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half undone, a supervisor went on without the file that made it a node's."""

    def fails(home: Home, say: Any) -> None:
        raise KeyboardInterrupt

    def end(home: Home) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        ended.append(home)

    ended: list[Home] = []
    monkeypatch.setattr(joining, "_start", fails)
    monkeypatch.setattr(joining, "supervisor_alive", lambda home: True)
    monkeypatch.setattr(joining, "end_services", end)
    with pytest.raises(KeyboardInterrupt):
        stage.join()
    assert ended and not stage.home.root.exists()


def test_what_is_undone_is_undone_at_the_head_too(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent may have been linked in the moment of the Ctrl-C: a node that answers no more would stay."""

    def fails(home: Home, say: Any) -> None:
        (home.node_dir / "id").write_text("gpu-9")
        raise KeyboardInterrupt

    forgotten: list[str] = []
    monkeypatch.setattr(joining, "_start", fails)
    monkeypatch.setattr(joining, "supervisor_alive", lambda home: True)
    monkeypatch.setattr(joining, "end_services", lambda home: None)
    monkeypatch.setattr(joining, "forget", lambda endpoint, node, say: forgotten.append(node))
    with pytest.raises(KeyboardInterrupt):
        stage.join()
    assert forgotten == ["gpu-9"]
    stage.home.node_dir.mkdir(parents=True)
    stage.home.root.chmod(0o700)
    (stage.home.node_dir / "id").write_text("gpu-9")
    stage.nodes = [other(id="gpu-9", status="silent", host=socket.gethostname())]
    with pytest.raises(KeyboardInterrupt):
        stage.join()
    assert forgotten == ["gpu-9"], "who was a node before may have work to answer for"


def test_what_was_of_another_cluster_is_put_aside_and_what_is_of_the_same_is_kept(stage: Stage) -> None:
    """Runs of two clusters may have the same names."""
    home = stage.home
    for name in ("workers", "files"):
        (home.node_dir / name / "echo-1").mkdir(parents=True)
    home.output_dir("echo-1").mkdir(parents=True)
    home.root.chmod(0o700)
    (home.node_dir / "cluster").write_text("c-1")
    stage.join()
    assert (home.node_dir / "workers" / "echo-1").exists()
    forget_cluster(home)
    (home.node_dir / "cluster").write_text("c-7")
    stage.join()
    assert not (home.node_dir / "workers").exists() and not home.output_dir("").exists()
    assert (home.root / "outputs-c-7" / "echo-1").is_dir()


def test_a_join_that_fails_after_it_began_leaves_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(home: Home, say: Any) -> None:
        assert home.join_file.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(joining, "_start", fails)
    with pytest.raises(KeyboardInterrupt):
        stage.join()
    assert not stage.home.root.exists()
    stage.home.root.mkdir(mode=0o700)
    (stage.home.root / "mine").touch()
    with pytest.raises(KeyboardInterrupt):
        stage.join()
    assert (stage.home.root / "mine").exists() and not stage.home.token_file.exists()


def test_a_node_whose_head_has_moved_keeps_what_it_is_not_told_again(stage: Stage) -> None:
    """The line to paste names no slots and no price."""
    stage.join(slots=3, price=0.5, address="127.0.0.1")
    join(stage.home, "127.0.0.9", TOKEN, Wish(), lambda text: None)
    config = msgspec.json.decode(stage.home.config_file.read_bytes(), type=ClusterConfig)
    joined = msgspec.json.decode(stage.home.join_file.read_bytes(), type=JoinConfig)
    assert config == ClusterConfig(slots=3, price=0.5)
    assert (joined.address, joined.address_of_this_node) == ("127.0.0.9:7700", "127.0.0.1")
    join(stage.home, "127.0.0.9", TOKEN, Wish(slots=1), lambda text: None)
    assert msgspec.json.decode(stage.home.config_file.read_bytes(), type=ClusterConfig).slots == 1


def test_a_machine_that_was_set_up_anew_is_told_of_its_former_name(stage: Stage) -> None:
    said: list[str] = []
    stage.nodes = [other(host=socket.gethostname(), address="127.0.0.1", status="silent"), other(id="x", host="x")]
    join(stage.home, HEAD, TOKEN, Wish(), said.append)
    assert [text for text in said if "forget" in text] == [
        "if this machine was node gpu-1 before, type later: racimo nodes forget gpu-1 --confirm-dead"
    ]


def test_a_machine_that_had_joined_stays_as_it_was_if_it_cannot_dial_the_new_address(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that moved: the same cluster at another address."""
    stage.join(slots=2)
    before = {path: path.read_bytes() for path in (stage.home.join_file, stage.home.config_file)}

    def fails(home: Home, say: Any) -> None:
        assert msgspec.json.decode(home.join_file.read_bytes(), type=JoinConfig).address == "127.0.0.9:7700"
        raise RacimoError("start-failed", "it did not come up")

    monkeypatch.setattr(joining, "_start", fails)
    with pytest.raises(RacimoError, match="did not come up"):
        join(stage.home, "127.0.0.9", TOKEN, Wish(), lambda text: None)
    assert {path: path.read_bytes() for path in before} == before
