"""Units of systemd: what is written is what systemd understands, and does what it should for work that must live on."""

import shutil
import subprocess
from pathlib import Path

import pytest

from racimo.client import units
from racimo.spec.home import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "a home with 50% & $more")
    made.root.mkdir()
    return made


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
@pytest.mark.parametrize("of_root", [True, False])
def test_systemd_finds_nothing_wrong(home: Home, tmp_path: Path, of_root: bool) -> None:
    path = tmp_path / "racimo-test.service"
    path.write_text(units.unit_text(home, of_root=of_root))
    words = ["systemd-analyze", "verify", *([] if of_root else ["--user"]), str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    complaints = [line for line in done.stderr.splitlines() if path.name in line]
    assert not complaints and (done.returncode == 0 or "racimo" not in done.stderr), done.stderr


def test_the_work_outlives_the_supervisor_and_one_workers_lack_of_memory(home: Home) -> None:
    text = units.unit_text(home, of_root=True)
    for line in ("KillMode=process", "OOMPolicy=continue", "Restart=on-failure", "After=network-online.target"):
        assert line in text.splitlines()
    assert "racimo.control.supervisor" in text and "--service" in text
    assert "50%% & $$more" in text, "what systemd would read as its own is written so that it does not"


def test_a_home_that_has_left_its_cluster_starts_nothing_at_boot(home: Home) -> None:
    assert "ConditionPathExists=" in (head := units.unit_text(home, of_root=True)) and "config.json" in head
    home.join_file.write_text("{}")
    assert "join.json" in units.unit_text(home, of_root=True)


def test_without_a_running_systemd_it_says_what_to_type(home: Home, tmp_path: Path) -> None:
    said: list[str] = []
    path = units.install(home, said.append, tmp_path / "units")
    assert path.read_text().startswith("[Unit]") and path.name.startswith("racimo-")
    assert f"enable --now {path.name}" in said[0] and "systemd does not run here" in said[0]


def test_the_usual_home_has_the_usual_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert units.unit_name(Home(tmp_path / ".racimo")) == "racimo.service"
