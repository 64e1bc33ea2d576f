"""`racimo check`: each finding is right, and a wrong one has its cure."""

import shutil
import sqlite3
from pathlib import Path
from typing import NamedTuple

import pytest

from racimo.client import findings
from racimo.client.findings import Finding, examine
from racimo.spec.home import Home


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.delenv("RACIMO_ADDRESS", raising=False)
    made = Home(tmp_path / "home")
    made.journal_file.parent.mkdir(parents=True)
    made.root.chmod(0o700)
    return made


def about(found: list[Finding], subject: str) -> Finding:
    return next(finding for finding in found if finding.about == subject)


def test_a_fresh_machine_has_nothing_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RACIMO_ADDRESS", raising=False)
    found = examine(Home(tmp_path / "none"))
    assert not [finding for finding in found if finding.verdict == "wrong"]
    assert "racimo up" in about(found, "cluster").found
    assert not (tmp_path / "none").exists(), "looking changes nothing"


def test_a_token_that_others_can_read_is_wrong(home: Home) -> None:
    home.token_file.write_text("secret")
    home.token_file.chmod(0o644)
    finding = about(examine(home), "private files")
    assert finding.verdict == "wrong" and finding.cure == f"chmod 600 {home.token_file}"
    home.token_file.chmod(0o600)
    assert about(examine(home), "private files").verdict == "ok"


def test_a_home_that_others_can_write_to_is_wrong(home: Home) -> None:
    home.root.chmod(0o777)
    finding = about(examine(home), "home")
    assert finding.verdict == "wrong" and finding.cure == f"chmod 700 {home.root}"


def test_a_damaged_journal_is_wrong_and_a_whole_one_is_not(home: Home) -> None:
    with sqlite3.connect(home.journal_file) as database:
        database.execute("CREATE TABLE t (a)")
    assert about(examine(home), "journal").verdict == "ok"
    home.journal_file.write_bytes(b"this is no database at all" * 100)
    finding = about(examine(home), "journal")
    assert finding.verdict == "wrong" and "racimo down && racimo up" in finding.cure


def test_little_room_on_the_disk_is_wrong(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        total: int = 10**11
        used: int = 10**11 - 10**8
        free: int = 10**8

    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage())
    finding = about(examine(home), "disk")
    assert finding.verdict == "wrong" and "100 MB of 100 GB free" in finding.found


def test_a_clock_before_this_software_was_written_is_wrong(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings.time, "time", lambda: 86_400.0)
    finding = about(examine(home), "clock")
    assert finding.verdict == "wrong" and "1970-01-02" in finding.found


def test_another_cluster_in_the_environment_is_said(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACIMO_ADDRESS", "http://gpu-box:1")
    assert "gpu-box" in about(examine(home), "cluster").found


def test_that_roles_do_not_isolate_is_always_said(home: Home) -> None:
    assert about(examine(home), "roles").verdict == "note"
