"""Following a run: what goes where, why it waits, how it ends, and that Ctrl-C ends the following alone."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_stage import Stage, Turns, run_view, stream

from racimo.cli import follow as follow_module
from racimo.cli.follow import Screen, finish, follow
from racimo.client.api import Client
from racimo.control.views import LogLine, RunProgress
from racimo.state.nouns import Failure, Reason

LOGS, RUN = "GET /v1/runs/echo-1/logs", "GET /v1/runs/echo-1"
ENDED = run_view(status="succeeded")


def line(text: str, worker: int = 0, stream: str = "out") -> LogLine:
    return LogLine(worker=f"echo-1/1/{worker}", stream=stream, text=text)


@pytest.fixture
def same_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watching threads speak to the same stage."""
    monkeypatch.setattr(Client, "beside", lambda self: self)
    monkeypatch.setattr(Client, "close", lambda self: None)


def test_output_goes_where_the_command_sent_it(
    tmp_path: Path, same_stage: None, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage(tmp_path, {LOGS: stream(line("to out"), line("to err", stream="err")), RUN: ENDED})
    assert follow(stage.client, run_view()) == 0
    out, err = capsys.readouterr()
    assert out == "to out\n"
    assert err == "racimo: echo-1 submitted\nto err\n"


def test_several_workers_are_told_apart(tmp_path: Path, same_stage: None, capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage(tmp_path, {LOGS: stream(line("a", 0), line("b", 1)), RUN: ENDED})
    follow(stage.client, run_view(most=2), quiet=True)
    assert capsys.readouterr() == ("[0] a\n[1] b\n", "")


def test_with_json_stdout_holds_the_view_alone(
    tmp_path: Path, same_stage: None, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage(tmp_path, {LOGS: stream(line("a")), RUN: ENDED})
    assert follow(stage.client, run_view(), as_json=True) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["status"] == "succeeded"
    assert "a\n" in err


def test_a_waiting_run_says_why_while_it_waits_and_only_when_that_changes(
    tmp_path: Path, same_stage: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ray#34816: an impossible request hangs in silence; dstack#3405: two situations, one message."""
    import threading

    monkeypatch.setattr(follow_module, "FIRST_LOOK_S", 0.0)
    monkeypatch.setattr(follow_module, "LOOK_AGAIN_S", 0.0)
    started = threading.Event()

    def waiting(text: str):  # type: ignore[no-untyped-def]
        return run_view(status="queued", reason=Reason(code="busy", text=text))

    def starts(request: object) -> object:
        started.set()
        return run_view()

    first = waiting("3 devices are busy")
    views = Turns(first, first, waiting("1 device is busy"), starts, ENDED)

    def lines_after_the_start() -> Iterator[bytes]:
        assert started.wait(10)
        yield b""

    import httpx

    stage = Stage(tmp_path, {LOGS: lambda request: httpx.Response(200, content=lines_after_the_start()), RUN: views})
    assert follow(stage.client, first) == 0
    err = capsys.readouterr().err
    assert err.count("echo-1 waits: 3 devices are busy") == 1
    assert err.count("echo-1 waits: 1 device is busy") == 1


def test_ctrl_c_ends_the_following_and_not_the_run(
    tmp_path: Path, same_stage: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """skypilot#402, skypilot#756: people fear Ctrl-C because they do not know what it kills."""

    def interrupted(request: object) -> object:
        raise KeyboardInterrupt

    stage = Stage(tmp_path, {LOGS: interrupted, RUN: run_view()})
    assert follow(stage.client, run_view()) == 130
    err = capsys.readouterr().err
    assert "racimo logs -f echo-1" in err and "racimo stop echo-1" in err
    assert not [request for request in stage.requests if request.method == "POST"]


def test_a_failed_run_begins_with_the_first_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure(
        code="worker-raised",
        message="ValueError: no",
        hint="racimo logs r-1",
        traceback="Traceback ...\n",
        rank=1,
        others=2,
    )
    view = run_view(status="failed", failure=failure, reason=Reason(code="failed", text="ValueError: no and so on"))
    assert finish(view, as_json=False, quiet=True) == 1
    assert capsys.readouterr().err.splitlines() == [
        "Traceback ...",
        "rank 1: ValueError: no [worker-raised]",
        "2 others failed too",
        "  racimo logs r-1",
        "racimo: echo-1 failed",
    ]


@pytest.mark.parametrize(("status", "exit_code"), [("succeeded", 0), ("failed", 1), ("stopped", 1), ("lost", 1)])
def test_the_exit_code_says_how_the_run_ended(status: str, exit_code: int) -> None:
    assert finish(run_view(status=status), as_json=False, quiet=True) == exit_code


class Terminal:
    """A stderr that says it is a terminal, and keeps what is written."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_on_a_terminal_the_live_line_makes_way_for_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    screen = Screen(quiet=False, logs_to_stderr=False)
    screen.status("step 1")
    screen.log(line("printed"), with_worker=False)
    screen.status("step 2")
    screen.close()
    assert terminal.text == "step 1\r\x1b[Kstep 1\r\x1b[Kstep 2\r\x1b[K"
    assert capsys.readouterr().out == "printed\n"


def test_off_a_terminal_there_is_a_plain_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(quiet=False, logs_to_stderr=False)
    screen.status("step 1")
    screen.status("step 2")
    assert capsys.readouterr().err == "racimo: step 1\n"


def test_the_live_line_is_shown_once_steps_are_made() -> None:
    def at(status: str, step: int, until: int = 0) -> bool:
        progress = RunProgress(run="r", status=status, num_workers=1, step=step, until=until)
        return follow_module.is_worth_showing(progress)

    assert at("running", 0, 100) and at("running", 3)
    assert not at("running", 0) and not at("succeeded", 3)
