"""Which services a machine has, by what its home says."""

import json
from pathlib import Path

import pytest

from racimo.control.roles import agent_arguments, roles_of


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
