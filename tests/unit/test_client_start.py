"""What `racimo up` finds in a home that something was cut short in."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from racimo.client import ending, start
from racimo.client.start import prepare_home, up
from racimo.spec.config import ClusterConfig, ClusterFile, parse_token
from racimo.spec.home import Home
from racimo.state.nouns import Node

BIND = "127.0.0.1:7700"


def test_the_token_of_a_join_that_was_killed_does_not_become_that_of_a_cluster_here(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir(mode=0o700)
    home.token_file.write_text(f"of-another:{'0' * 64}")
    home.cluster_file.write_bytes(msgspec.json.encode(ClusterFile("c-9", "https://10.0.0.9:7700", "0.1.0")))
    prepare_home(home)
    token = parse_token(home.token_file.read_text())
    assert token.secret != "of-another" and not token.pin
    assert not home.cluster_file.exists(), "clients would go on to the other cluster"
    prepare_home(home)
    assert parse_token(home.token_file.read_text()) == token


def test_down_names_the_machines_that_stay_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, said = Home(tmp_path), []
    (home.node_dir).mkdir()
    (home.node_dir / "id").write_text("h1")
    nodes = [Node(id=name, host=name, devices=(), address="10.0.0.1") for name in ("h1", "h2", "h3")]
    monkeypatch.setattr(ending, "supervisor_alive", lambda home: True)
    monkeypatch.setattr(ending.Finder, "find", lambda self: object())
    monkeypatch.setattr(ending, "nodes_of", lambda endpoint: nodes)
    monkeypatch.setattr(ending, "_ask_shutdown", lambda endpoint, say: True)
    assert ending.down(home, say=said.append)
    assert said[0] == "still joined, waiting for the next racimo up here: h2, h3" and "racimo down" in said[1]


@pytest.mark.parametrize(("is_open", "bind", "changed"), [(False, BIND, 1), (True, BIND, 0), (False, None, 0)])
def test_an_up_bind_that_was_killed_half_way_is_completed_by_typing_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool, bind: str | None, changed: int
) -> None:
    """The home says the new address already, so that nothing seems to change; but nobody listens there."""
    home = Home(tmp_path)
    home.config_file.write_bytes(msgspec.json.encode(ClusterConfig(slots=1, bind=BIND)))
    changes: list[Any] = []
    monkeypatch.setattr(start, "supervisor_alive", lambda home: True)
    monkeypatch.setattr(start, "await_node", lambda *rest, **more: None)
    monkeypatch.setattr(start, "join_line", lambda home: "")
    monkeypatch.setattr(start, "_door_is_open", lambda home, bind: is_open)
    monkeypatch.setattr(start, "_change", lambda *rest: changes.append(rest))
    up(home, bind=bind, say=lambda text: None)
    assert len(changes) == changed
