"""Which services a machine has, by what its home says."""

import json
import signal
from pathlib import Path

import pytest

from racimo.control.roles import agent_arguments, roles_of
from racimo.control.supervisor import Supervisor


def home(tmp_path: Path, **files: object) -> str:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("files", "roles"),
    [
        ({}, ["agent", "control"]),
        ({"config": {"bind": "10.0.0.1:7700"}}, ["agent", "control"]),
        ({"config": {"bind": "10.0.0.1:7700", "carrier": "ray"}}, ["agent", "control", "ray"]),
        ({"config": {"carrier": "ray"}}, ["agent", "control"]),
        ({"join": {"address": "a", "cluster": "c"}, "config": {"slots": 2}}, ["agent", "watch"]),
        ({"join": {"address": "a", "cluster": "c", "carrier": "ray"}}, ["agent", "watch", "ray"]),
        ({"config": "{torn"}, ["agent", "control"]),
        ({"join": "{torn"}, ["agent", "watch"]),
    ],
)
def test_the_home_says_which_services_there_are(tmp_path: Path, files: dict[str, object], roles: list[str]) -> None:
    assert roles_of(home(tmp_path, **files)) == roles


def test_a_machine_may_offer_nothing_at_all(tmp_path: Path) -> None:
    root = home(tmp_path, config={"slots": 0, "price": 0.5})
    assert agent_arguments(root) == ["--slots", "0", "--price", "0.5"]


def test_a_home_that_is_no_longer_a_nodes_ends_instead_of_becoming_a_head(tmp_path: Path) -> None:
    """Its files went while its services lived: a control process there would be a cluster that nobody asked for."""
    (tmp_path / "processes").mkdir()
    supervisor = Supervisor(home(tmp_path, join={"address": "a", "cluster": "c"}), lock=-1)
    signal.set_wakeup_fd(-1)
    supervisor.follow_home()
    assert not supervisor.ending
    (tmp_path / "join.json").unlink()
    supervisor.follow_home()
    assert (tmp_path / "processes" / "shutdown").exists() and set(supervisor.services) == {"agent", "watch"}
