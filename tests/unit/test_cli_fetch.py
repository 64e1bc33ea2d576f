"""Fetching outputs: which node's is taken, nothing of the user's is written over, and what is no output is said."""

from pathlib import Path

import httpx
import pytest
from client_stage import Stage, run_view

from racimo.agent.outputs import MAX_BESIDE, files_beside
from racimo.cli import fetch
from racimo.cli.main import make_parser
from racimo.control.views import ClusterView, OutputsView, OutputView
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

OUTPUTS = "GET /v1/runs/echo-1/outputs"
MODEL = OutputView(path="model.pt", size_bytes=3, modified_wall_s=0.0, node="h1", others=("h2",))


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.chdir(tmp_path)
    answers = {
        OUTPUTS: OutputsView(files=(MODEL,)),
        f"{OUTPUTS}/model.pt": lambda _: httpx.Response(200, content=b"new"),
    }
    found = Stage(tmp_path, {**answers, "GET /v1/runs/echo-1": run_view()})
    monkeypatch.setattr(fetch, "Client", lambda **_: found.client)
    return found


def get(*words: str) -> int:
    parser = make_parser("get")
    fetch._get_arguments(parser)
    return fetch._get(parser.read(list(words)))


def test_of_several_nodes_with_one_name_it_is_said_whose_was_taken(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    get("echo-1", "model.pt")
    assert "model.pt is that of h1; h2 wrote one too: racimo get ... --node NODE" in capsys.readouterr().err
    get("echo-1")
    assert capsys.readouterr().out.rstrip().endswith("h1 (also h2)")


@pytest.mark.parametrize("own", ["old", "older"])
def test_another_file_that_is_there_is_not_written_over_unless_forced(stage: Stage, own: str) -> None:
    Path("model.pt").write_text(own)
    with pytest.raises(RacimoError, match="is there already") as caught:
        get("echo-1", "model.pt")
    assert "--force" in caught.value.hint and Path("model.pt").read_text() == own
    assert [path.name for path in Path().iterdir()] == ["model.pt"]
    get("echo-1", "model.pt", "--force")
    assert Path("model.pt").read_text() == "new"
    get("echo-1", "model.pt")


def test_a_folder_made_for_outputs_is_marked_and_one_that_was_there_is_not(stage: Stage) -> None:
    Path("mine").mkdir()
    get("echo-1", "--all")
    get("echo-1", "--all", "--to", "mine")
    assert Path("echo-1", fetch.FETCHED_MARK).exists() and not Path("mine", fetch.FETCHED_MARK).exists()


def test_no_outputs_says_where_they_would_be_and_what_was_written_elsewhere(stage: Stage, tmp_path: Path) -> None:
    stage.answers[OUTPUTS] = OutputsView(files=(), beside=("model.pt",))
    stage.answers["GET /v1/cluster"] = ClusterView(
        id="c", version="1", protocol=2, home=str(tmp_path), address="a", started_wall_s=0.0, num_devices=1, num_free=0,
        price_per_device_hour=0.0, num_queued=0, num_running=1, num_ended=0,
    )  # fmt: skip
    with pytest.raises(RacimoError) as caught:
        get("echo-1")
    assert "$RACIMO_OUTPUT_DIR" in caught.value.hint and "backup" not in caught.value.message
    assert stage.said[0].startswith("echo-1 left in its working folder model.pt: no outputs")
    Home(tmp_path).restored_file.parent.mkdir()
    Home(tmp_path).restored_file.touch()
    with pytest.raises(RacimoError, match="backups hold no outputs"):
        get("echo-1")


def test_files_newer_than_the_workers_in_the_newest_attempts_folder_are_no_outputs(tmp_path: Path) -> None:
    import os

    home = Home(tmp_path)
    assert files_beside(home, "echo-1") == []
    for attempt in (9, 10):
        files = home.attempt_files_dir("echo-1", attempt)
        (files / "pkg" / "__pycache__").mkdir(parents=True)
        began = home.worker_dir(f"echo-1/{attempt}/0") / "worker.json"
        began.parent.mkdir(parents=True)
        for path, at_s in ((files / "train.py", 1), (began, 2), (files / "pkg/log.txt", 3), (files / "model.pt", 3)):
            path.touch()
            os.utime(path, (at_s, at_s))
        (files / "pkg/__pycache__/m.pyc").touch()
    assert files_beside(home, "echo-1") == ["model.pt", "pkg/log.txt"]
    for number in range(MAX_BESIDE):
        (home.attempt_files_dir("echo-1", 10) / f"{number}").touch()
    assert len(files_beside(home, "echo-1")) == MAX_BESIDE
