"""Commands through `main` against a cluster in this process: what they print, and their exit codes."""

import io
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from client_stage import Stage, run_view

import racimo.client
from racimo.cli import render
from racimo.cli.fetch import exit_code
from racimo.cli.main import main
from racimo.control.views import WorkerView
from racimo.state.events import Record, RunEnded
from racimo.state.nouns import Exit, Failure, Reason

READING = ["ps", "nodes", "show r-1", "why r-1", "events r-1", "logs r-1", "logs -f r-1", "stop r-1", "pause r-1",
           "resume r-1", "scale r-1 2", "get r-1", "exec r-1 -- ls", "secret list", "secret rm K"]  # fmt: skip


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage(tmp_path, {})
    monkeypatch.setattr(racimo.client, "Client", lambda **settings: made.client)
    return made


@pytest.mark.parametrize("words", READING)
def test_who_only_looks_or_changes_starts_no_cluster(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("RACIMO_HOME", str(home))
    monkeypatch.delenv("RACIMO_ADDRESS", raising=False)
    assert main(words.split()) == 3
    assert "no cluster is running here" in (said := capsys.readouterr().err) and said.endswith("  racimo up\n")
    assert not home.exists()


def test_several_runs_are_all_changed_and_every_error_is_said(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    reason = Reason(code="frozen", text="paused: frozen where it was")
    unknown = httpx.Response(404, json={"code": "run-unknown", "message": "there is no run 'b'", "hint": "racimo ps"})
    stage.answers = {
        "POST /v1/runs/a/stop": run_view(id="a", status="stopping"),
        "POST /v1/runs/b/stop": unknown,
        "POST /v1/runs/c/stop": run_view(id="c", status="paused", reason=reason),
    }
    assert main(["stop", "a", "b", "c"]) == 2
    out, err = capsys.readouterr()
    assert out == "a stopping\nc paused: frozen where it was\n"
    assert err == "racimo: there is no run 'b' [run-unknown]\n  racimo ps\n"


def test_a_worker_that_is_none_is_said_with_those_there_are(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    workers = tuple(WorkerView(id=f"echo-1/1/{i}", index=i, node="n", devices=(i,), status="exited") for i in (0, 1))
    stage.answers = {"GET /v1/runs/echo-1": run_view(status="failed", workers=workers, most=2)}
    for words in (["logs", "echo-1", "--worker", "5"], ["logs", "-f", "echo-1", "--worker", "5"]):
        assert main(words) == 2
        assert "echo-1 has no worker 5, only 0, 1 [invalid-request]" in capsys.readouterr().err


def test_an_empty_secret_is_refused_with_a_way_to_give_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["secret", "set", "KEY"]) == 2
    err = capsys.readouterr().err
    assert err == "racimo: the value of KEY is empty [invalid-request]\n  racimo secret set KEY < FILE\n"


def test_ctrl_c_at_the_prompt_of_a_secret_ends_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(prompt: str) -> str:
        print(prompt, end="", file=sys.stderr)
        raise KeyboardInterrupt

    monkeypatch.setattr("getpass.getpass", interrupted)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["secret", "set", "KEY"]) == 130
    assert capsys.readouterr().err == "value of KEY (not shown): \nracimo: interrupted\n"


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (Exit(outcome="finished", code=0), 0),
        (Exit(outcome="failed", code=3), 3),
        (Exit(outcome="killed", signal=9), 137),
        (Exit(outcome="unknown"), 1),
    ],
)
def test_exec_ends_as_its_command_did(ending: Exit, code: int) -> None:
    assert exit_code(ending) == code


@pytest.mark.parametrize("columns", ["30", "200"])
def test_ps_has_no_costs_where_there_is_no_price(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    """skypilot#6680: owned machines show a cost of $0.00."""
    monkeypatch.setenv("COLUMNS", columns)
    why = Reason(code="running", text="it has all that it asked for and more")
    stage.answers = {"GET /v1/runs": [run_view(id="a", reason=why), run_view(id="b")]}
    assert main(["ps"]) == 0
    out, err = capsys.readouterr()
    assert "price" not in out and "$" not in out and "COST" not in out and not err


def test_an_ended_run_shows_the_workers_it_had() -> None:
    assert render.ps_row(run_view(status="failed", most=3))[3] == "3"
    assert render.ps_row(run_view(num_live_workers=2, most=3))[3] == "2/3"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ValueError: no", "failed, ValueError: no [worker-raised]"),
        ("ValueError: no; 1 of 1 retry used", "failed, ValueError: no [worker-raised]: 1 of 1 retry used"),
    ],
)
def test_an_event_says_its_failure_once(text: str, shown: str) -> None:
    failure = Failure(code="worker-raised", message="ValueError: no")
    event = RunEnded(run="r", status="failed", reason=Reason(code="worker-raised", text=text), failure=failure)
    line = render.event_line(Record(seq=1, at_s=0.0, wall_s=0.0, event=event))
    assert line.partition("run ended")[2].strip() == shown


def test_the_client_goes_without_httpx_command_line() -> None:
    script = (
        "import racimo.client.api, sys; print(*sys.modules);"
        "import importlib.util; print(importlib.util.find_spec('httpx._main') is not None)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules, can_be_imported = done.stdout.splitlines()
    assert "httpx" in modules.split() and not set(modules.split()) & {"httpx._main", "click", "rich"}
    assert can_be_imported == "True"
