"""Leaving a cluster ends what is of this machine, and nothing of another's."""

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from racimo.client import forgetting, leaving
from racimo.client.discovery import Endpoint
from racimo.control.views import NodeView
from racimo.spec.config import JoinConfig, LinkState
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.state.nouns import Device, Node

ENDPOINT = Endpoint(address="https://10.0.0.1:7700", token="secret", token_source="here")


class Stage:
    """A running node whose head answers; what is asked of it is in `asked`, what was said in `said`."""

    def __init__(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = home
        self.asked: list[str] = []
        self.said: list[str] = []
        home.node_dir.mkdir(parents=True)
        (home.node_dir / "id").write_text("gpu-1")
        home.join_file.write_bytes(msgspec.json.encode(JoinConfig(address="10.0.0.1:7700", cluster="c-1")))
        self.node = Node(id="gpu-1", host=socket.gethostname(), devices=(Device(0),), address="10.0.0.2")
        monkeypatch.setattr(leaving, "supervisor_alive", lambda home: True)
        monkeypatch.setattr(leaving, "local_endpoint", lambda home: ENDPOINT)
        monkeypatch.setattr(leaving, "end_services", lambda home: None)
        monkeypatch.setattr(leaving, "ask", self.ask)
        monkeypatch.setattr(forgetting, "ask", self.ask)

    def ask(self, endpoint: Any, method: str, path: str, kind: Any, body: Any = None) -> Any:
        if method == "GET":
            return [NodeView(node=self.node, num_free=1)]
        self.asked.append(path)
        return None

    def link(self, state: Any) -> None:
        content = msgspec.json.encode(LinkState(state=state, since_wall_s=0.0, head="10.0.0.1:7700"))
        self.home.link_file.write_bytes(content)

    def leave(self) -> None:
        leaving.leave(self.home, now=False, say=self.said.append)
        assert not self.home.join_file.exists()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(Home(tmp_path), monkeypatch)


def test_a_node_is_drained_and_forgotten(stage: Stage) -> None:
    stage.link("up")
    stage.leave()
    assert stage.asked == ["/v1/nodes/gpu-1/drain", "/v1/nodes/gpu-1/forget"] and not stage.said


@pytest.mark.parametrize("same_host", [True, False])
def test_leaving_with_a_copy_of_a_nodes_home_leaves_that_node_and_its_work_alone(stage: Stage, same_host: bool) -> None:
    if same_host:
        stage.link("refused")
    else:
        stage.node = msgspec.structs.replace(stage.node, host="another-host")
    stage.leave()
    assert stage.asked == []
    (said,) = stage.said
    assert f"node gpu-1 is on host {stage.node.host} and stays in the cluster" in said


def test_a_node_that_is_refused_and_not_up_is_forgotten(stage: Stage) -> None:
    """Such as after an upgrade of its Python alone."""
    stage.link("refused")
    stage.node = msgspec.structs.replace(stage.node, status="silent")
    stage.leave()
    assert "/v1/nodes/gpu-1/forget" in stage.asked


def test_who_interrupts_the_wait_is_told_how_the_node_stands(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def drain(*rest: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(leaving, "_drain", drain)
    with pytest.raises(KeyboardInterrupt):
        stage.leave()
    assert "racimo drain gpu-1 --undo" in stage.said[0] and stage.home.join_file.exists()


def test_why_the_head_cannot_be_asked_is_said(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that was set up anew answers well enough, with another certificate."""

    def ask(*rest: Any) -> None:
        raise RacimoError("certificate-mismatch", "it shows another certificate")

    monkeypatch.setattr(leaving, "ask", ask)
    stage.leave()
    assert stage.said[0] == "the head cannot be asked (it shows another certificate): ending at once"
    assert "nodes forget gpu-1 --confirm-dead" in stage.said[1]
