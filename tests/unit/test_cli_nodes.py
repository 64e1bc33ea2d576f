"""`nodes`, `drain` and `check` as words: how a node is, until when, and what was found about pairs."""

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from client_stage import Stage

import racimo.cli.fetch
import racimo.client
from racimo.agent.protocol import ProcessUsage
from racimo.cli.check import MAX_WHOLE_SECTIONS, check_lines
from racimo.cli.main import main
from racimo.cli.render import NODE_TITLES, node_row, node_state
from racimo.control.views import Finding, NodeView, OutputsView, OutputView
from racimo.state.nouns import Device, Node, Reason


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage(tmp_path, {"POST /v1/nodes/gpu-1/drain": {"ok": True}, "POST /v1/nodes/gpu-1/forget": {"ok": True}})
    monkeypatch.setattr(racimo.client, "Client", lambda **settings: made.client)
    monkeypatch.setattr(racimo.cli.fetch, "Client", lambda **settings: made.client)
    return made


def view(
    leases: dict[int, str] | None = None, silent_s: float = 0.0, left_s: float | None = None, **node: Any
) -> NodeView:
    devices = (Device(0, "cuda", "H100"), Device(1, "cuda", "H100"))
    made = msgspec.structs.replace(Node(id="gpu-1", host="gpu", devices=devices, address="10.0.0.2"), **node)
    return NodeView(node=made, num_free=2, leases=leases or {}, silent_s=silent_s, drain_left_s=left_s)


@pytest.mark.parametrize(
    ("shown", "state"),
    [
        (view(), "up"),
        (view(status="silent", silent_s=12.4), "silent 12s"),
        (view(status="lost", silent_s=125.0), "lost 2m 05s"),
        (view(draining=True, leases={0: "r-1/1/0"}), "draining"),
        (view(draining=True, leases={0: "r-1/1/0"}, left_s=590.0), "draining 9m 50s"),
        (view(draining=True, left_s=590.0), "drained"),
        (view(draining=True, status="silent", silent_s=3.0), "silent 3.0s"),
    ],
)
def test_the_state_of_a_node_in_a_word(shown: NodeView, state: str) -> None:
    assert node_state(shown) == state


def test_a_row_has_where_it_is_who_holds_it_and_why_it_is_so() -> None:
    shown = view({0: "r-1/1/0", 1: "r-1/1/0"}, status="silent", silent_s=5.0, reason=Reason(code="x", text="no\nbeat"))
    row = dict(zip(NODE_TITLES, node_row(shown), strict=True))
    assert (row["ADDRESS"], row["DEVICES"], row["HELD BY"], row["REASON"]) == (
        "10.0.0.2", "2 cuda", "r-1/1/0 x2", "no beat",
    )  # fmt: skip


def test_drain_sends_the_deadline_in_seconds_and_shows_the_node(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.answers["GET /v1/nodes"] = [view({0: "r-1/1/0", 1: "r-1/1/0"}, draining=True, left_s=600.0)]
    assert main(["drain", "gpu-1", "--deadline", "10m"]) == 0
    assert stage.bodies("POST", "/v1/nodes/gpu-1/drain") == [{"deadline_s": 600.0}]
    assert capsys.readouterr().out == "gpu-1 draining 10m 00s, 1 worker there\n"
    stage.answers["GET /v1/nodes"] = [view()]
    assert main(["drain", "gpu-1", "--undo"]) == 0
    assert stage.bodies("POST", "/v1/nodes/gpu-1/drain")[1] == {"undo": True}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("drain gpu-1 --deadline 10", "a unit"),
        ("drain gpu-1 --deadline 10m --undo", "takes no --deadline"),
        ("nodes forget", "no NODE"),
        ("drain ../x", "there is no node '../x'"),
    ],
)
def test_what_cannot_be_meant_is_said(words: str, said: str, stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err and not stage.requests


def test_forget_says_that_it_is_dead_only_when_told(stage: Stage) -> None:
    assert main(["nodes", "forget", "gpu-1"]) == 0
    assert main(["nodes", "forget", "gpu-1", "--confirm-dead"]) == 0
    assert stage.bodies("POST", "/v1/nodes/gpu-1/forget") == [{}, {"confirm_dead": True}]


def test_a_host_s_name_stands_for_its_node(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.answers["POST /v1/nodes/gpu/drain"] = {"ok": True}
    stage.answers["GET /v1/nodes"] = [view(id="gpu-2", host="gpu-1"), view(draining=True)]
    assert main(["drain", "gpu"]) == 0 and main(["drain", "gpu-1"]) == 0
    assert capsys.readouterr().out == "gpu-1 drained, no workers there\n" * 2


def test_the_processes_of_all_nodes_are_shown_with_their_node(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    agent = ProcessUsage(role="agent", pid=7, resident_bytes=10**6, private_bytes=10**6, cpu_s=1.0)
    stage.answers["GET /v1/nodes"] = [
        msgspec.structs.replace(view(), processes=(agent,)),
        msgspec.structs.replace(view(id="gpu-2"), processes=(msgspec.structs.replace(agent, pid=8),)),
        view(id="gpu-3", status="silent"),
    ]
    assert main(["nodes", "--processes"]) == 0
    said = capsys.readouterr()
    assert [line.split()[:3] for line in said.out.splitlines()[1:]] == [
        ["gpu-1", "agent", "7"],
        ["gpu-2", "agent", "8"],
    ]
    assert "gpu-3 does not answer" in said.err
    assert main(["nodes", "--processes", "-o", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(one["node"], one["pid"]) for one in shown] == [("gpu-1", 7), ("gpu-2", 8)]


def test_outputs_of_one_node_are_asked_for_there(stage: Stage, tmp_path: Path) -> None:
    file = OutputView(path="a.txt", size_bytes=1, modified_wall_s=0.0, node="gpu-2")
    stage.answers["GET /v1/runs/r-1/outputs"] = OutputsView(files=(file,))
    stage.answers["GET /v1/runs/r-1/outputs/a.txt"] = httpx.Response(200, content=b"x")
    assert main(["get", "r-1", "a.txt", "--node", "gpu-2", "--to", str(tmp_path / "got")]) == 0
    assert [request.url.query for request in stage.requests] == [b"node=gpu-2"] * 2
    assert (tmp_path / "got").read_bytes() == b"x"


def finding(node: str = "", peer: str = "", verdict: Any = "ok", cure: str = "") -> Finding:
    return Finding(about="way" if peer else "disk", node=node, peer=peer, verdict=verdict, found="found", cure=cure)


def test_check_shows_this_machine_then_each_node_then_each_pair_once() -> None:
    nodes = [finding("b"), finding("a", "b"), finding("a", verdict="wrong", cure="cure it"), finding("b", "a")]
    assert check_lines([finding()], nodes, colour=False) == [
        "ok     disk: found",
        "", "node b", "ok     disk: found",
        "", "node a", "wrong  disk: found", "         cure it",
        "", "a <-> b", "ok     way a -> b: found", "ok     way b -> a: found",
    ]  # fmt: skip


def test_of_many_nodes_those_where_all_is_well_share_a_line() -> None:
    nodes = [
        finding(f"n{number}", verdict="wrong" if number == 3 else "ok") for number in range(MAX_WHOLE_SECTIONS + 1)
    ]
    lines = check_lines([], nodes, colour=False)
    assert lines == ["", "node n3", "wrong  disk: found", "", "ok     nodes: all is well with 10 of 11"]


def test_a_full_disk_is_not_an_unknown_one() -> None:
    view = NodeView(node=Node(id="n", host="h", devices=()), num_free=0, free_memory_bytes=10**9, free_disk_bytes=0)
    assert dict(zip(NODE_TITLES, node_row(view), strict=True))["DISK FREE"] == "0 B"
