"""Following a run: what goes where, why it waits, how it ends, and that Ctrl-C ends the following alone."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from client_stage import Stage, Turns, run_view, stream

from racimo.cli import follow as follow_module
from racimo.cli.follow import Screen, finish, follow
from racimo.client.api import Client
from racimo.control.views import ClusterView, LogLine, OutputView, RunProgress, RunView, WorkerView
from racimo.spec.errors import RacimoError
from racimo.spec.run import RunSpec
from racimo.state.nouns import Exit, Failure, Reason

LOGS, RUN, OUTPUTS = "GET /v1/runs/echo-1/logs", "GET /v1/runs/echo-1", "GET /v1/runs/echo-1/outputs"
NO_OUTPUTS = {"files": []}
QUIET = Screen(quiet=True)
RAISED = Failure(
    code="worker-raised",
    message="ValueError: no",
    hint="racimo logs echo-1",
    traceback="Traceback ...\n  in f\nValueError: no\n",
    rank=1,
    worker="echo-1/1/1",
)
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
    stage = Stage(
        tmp_path, {LOGS: stream(line("to out"), line("to err", stream="err")), RUN: ENDED, OUTPUTS: NO_OUTPUTS}
    )
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
    stage = Stage(tmp_path, {LOGS: stream(line("a")), RUN: ENDED, OUTPUTS: NO_OUTPUTS})
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

    logs = lambda request: httpx.Response(200, content=lines_after_the_start())  # noqa: E731
    stage = Stage(tmp_path, {LOGS: logs, RUN: views, OUTPUTS: NO_OUTPUTS})
    assert follow(stage.client, first) == 0
    err = capsys.readouterr().err
    assert err.count("echo-1 waits: 3 devices are busy") == 1
    assert err.count("echo-1 waits: 1 device is busy") == 1


def test_who_follows_learns_that_a_node_is_silent_and_answers_again_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import threading

    monkeypatch.setattr(follow_module, "LOOK_AGAIN_S", 0.0)

    def away(passed_s: int) -> RunView:
        text = f"its node h2 has not answered for {passed_s}s; it counts as lost in {600 - passed_s}s"
        return run_view(reason=Reason(code="waits-lease", text=text))

    stage = Stage(tmp_path, {RUN: Turns(run_view(), away(3), away(5), run_view(), ENDED)})
    follow_module._watch_nodes(stage.client, "echo-1", Screen(quiet=False), threading.Event())
    assert capsys.readouterr().err.splitlines() == [
        "racimo: echo-1: its node h2 has not answered for 3s; it counts as lost in 597s",
        "racimo: echo-1: its node answers again",
    ]


def test_a_cluster_that_has_ended_ends_the_following_with_how_to_come_back(tmp_path: Path, same_stage: None) -> None:
    stage = Stage(tmp_path, {LOGS: httpx.ConnectError("refused"), RUN: ENDED}, supervised=False)
    with pytest.raises(RacimoError) as caught:
        follow(stage.client, run_view())
    assert caught.value.kind.exit_code == 3
    assert caught.value.hint.splitlines() == ["racimo up", "racimo logs -f echo-1   # then goes on from there"]


def test_a_run_lost_with_its_node_says_how_the_next_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = Failure(code="node-lost", message="worker 0 was lost with its node h2", hint="racimo nodes")
    finish(Stage(tmp_path, {}).client, run_view(status="lost", failure=failure), QUIET, quiet=True)
    assert "  racimo nodes\n  racimo run --retries 1 ..." in capsys.readouterr().err


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


def test_a_failed_run_begins_with_the_first_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failure = msgspec.structs.replace(RAISED, others=2)
    view = run_view(status="failed", failure=failure, reason=Reason(code="failed", text="ValueError: no and so on"))
    assert finish(Stage(tmp_path, {}).client, view, QUIET, quiet=True) == 1
    assert capsys.readouterr().err.splitlines() == [
        "Traceback ...",
        "  in f",
        "ValueError: no",
        "rank 1 failed first: ValueError: no [worker-raised]",
        "2 others failed too",
        "  racimo logs echo-1",
        "racimo: echo-1 failed",
    ]


def failed(exit_of_the_other: Exit) -> RunView:
    exits = (exit_of_the_other, Exit(outcome="failed", code=1, failure=RAISED))
    workers = tuple(
        WorkerView(id=f"echo-1/1/{i}", index=i, node="n", devices=(i,), status="exited", exit=exit)
        for i, exit in enumerate(exits)
    )
    reason = Reason(code="worker-raised", text="ValueError: no")
    return run_view(status="failed", failure=RAISED, reason=reason, workers=workers, most=2)


def test_a_traceback_that_the_output_has_shown_is_not_shown_again_and_all_that_failed_are_counted(
    tmp_path: Path, same_stage: None, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line(text, rank, "err") for rank in (0, 1) for text in RAISED.traceback.splitlines()]
    other = Exit(outcome="failed", code=1, failure=msgspec.structs.replace(RAISED, worker="echo-1/1/0", rank=0))
    stage = Stage(tmp_path, {LOGS: stream(*lines), RUN: failed(other)})
    assert follow(stage.client, run_view(most=2)) == 1
    err = capsys.readouterr().err
    assert err.count("ValueError: no\n") == 2 and err.count("Traceback ...") == 2
    assert "rank 1 failed first: ValueError: no [worker-raised]\n1 other failed too\n" in err


def test_a_traceback_that_only_another_worker_has_shown_is_shown(
    tmp_path: Path, same_stage: None, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line(text, 0, "err") for text in RAISED.traceback.splitlines()]
    stage = Stage(tmp_path, {LOGS: stream(*lines), RUN: failed(Exit(outcome="killed", signal=9))})
    assert follow(stage.client, run_view(most=2)) == 1
    err = capsys.readouterr().err
    assert err.count("Traceback ...") == 2 and "rank 1: ValueError: no [worker-raised]" in err


def test_who_comes_back_sees_the_end_too(tmp_path: Path, same_stage: None, capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage(tmp_path, {LOGS: stream(line("a"), line("b", 1)), RUN: failed(Exit(outcome="killed", signal=9))})
    assert follow(stage.client, run_view(most=2), came_back=True, worker=1, tail=5) == 1
    out, err = capsys.readouterr()
    assert out == "a\nb\n" and "submitted" not in err and err.endswith("racimo: echo-1 failed\n")
    (request,) = [request for request in stage.requests if request.url.path.endswith("/logs")]
    assert dict(request.url.params) == {"follow": "1", "worker": "1", "tail": "5"}


def test_who_comes_back_with_json_gets_lines(
    tmp_path: Path, same_stage: None, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage(tmp_path, {LOGS: stream(line("a")), RUN: ENDED, OUTPUTS: NO_OUTPUTS})
    assert follow(stage.client, run_view(), as_json=True, came_back=True) == 0
    assert json.loads(capsys.readouterr().out) == {"worker": "echo-1/1/0", "stream": "out", "text": "a"}


def test_the_last_step_is_that_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(follow_module, "LAST_STEP_S", 0.0)

    def at(step: int) -> RunView:
        progress = RunProgress(run="echo-1", status="succeeded", num_workers=0, step=step, until=300)
        return run_view(kind="train", status="succeeded", progress=progress)

    finish(Stage(tmp_path, {RUN: at(300), OUTPUTS: NO_OUTPUTS}).client, at(299), QUIET, quiet=False)
    assert "step 300/300" in capsys.readouterr().err


def test_a_run_that_wrote_something_says_how_to_fetch_it(
    tmp_path: Path, same_stage: None, capsys: pytest.CaptureFixture[str]
) -> None:
    written = [OutputView(path="model.pt", size_bytes=1, modified_wall_s=0.0)]
    stage = Stage(tmp_path, {LOGS: stream(line("a")), RUN: ENDED, OUTPUTS: {"files": written}})
    follow(stage.client, run_view())
    assert capsys.readouterr().err.endswith("racimo: echo-1 outputs: racimo get echo-1\n")
    stage.answers[OUTPUTS] = NO_OUTPUTS
    follow(stage.client, run_view())
    assert "racimo get" not in capsys.readouterr().err


@pytest.mark.parametrize(("status", "exit_code"), [("succeeded", 0), ("failed", 1), ("stopped", 1), ("lost", 1)])
def test_the_exit_code_says_how_the_run_ended(tmp_path: Path, status: str, exit_code: int) -> None:
    assert finish(Stage(tmp_path, {}).client, run_view(status=status), QUIET, quiet=True) == exit_code


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
    screen = Screen(quiet=False)
    screen.status("step 1")
    screen.log(line("printed"), with_worker=False)
    screen.status("step 2")
    screen.close()
    assert terminal.text == "step 1\r\x1b[Kstep 1\r\x1b[Kstep 2\r\x1b[K"
    assert capsys.readouterr().out == "printed\n"


def test_off_a_terminal_there_is_a_plain_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(quiet=False)
    screen.status("step 1")
    screen.status("step 2")
    assert capsys.readouterr().err == "racimo: step 1\n"


def test_the_live_line_is_shown_once_steps_are_made() -> None:
    def at(status: str, step: int, until: int = 0) -> bool:
        progress = RunProgress(run="r", status=status, num_workers=1, step=step, until=until)
        return follow_module.is_worth_showing(progress)

    assert at("running", 0, 100) and at("running", 3)
    assert not at("running", 0) and not at("succeeded", 3)


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize(
    ("warnings", "env", "said"),
    [
        (["the node's agent does not answer"], "", "the node's agent does not answer"),
        ([], "lock.txt", "installing lock.txt"),
        ([], "", "racimo check looks for the cause"),
        (["unheard"], "lock.txt", "1 workers have no process yet: h2 has been building the environment ab for 9 s"),
    ],
)
def test_a_run_whose_workers_do_not_start_says_once_what_it_waits_for_even_if_quiet(
    tmp_path: Path,
    same_stage: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quiet: bool,
    warnings: list[str],
    env: str,
    said: str,
) -> None:
    import threading

    for name in ("FIRST_LOOK_S", "LOOK_AGAIN_S", "SLOW_START_S"):
        monkeypatch.setattr(follow_module, name, 0.0)
    told = threading.Event()

    def talk(text: str) -> None:
        print(f"racimo: {text}", file=sys.stderr)
        if "waits for its workers" in text:
            told.set()

    monkeypatch.setattr(follow_module, "talk", talk)

    def cluster(request: httpx.Request) -> httpx.Response:
        view = ClusterView(
            id="c", version="1", protocol=1, home="/h", address="a", started_wall_s=0.0, num_devices=1, num_free=0,
            price_per_device_hour=0.0, num_queued=0, num_running=1, num_ended=0, warnings=tuple(warnings),
        )  # fmt: skip
        return httpx.Response(200, content=msgspec.json.encode(view))

    def logs(request: httpx.Request) -> httpx.Response:
        assert told.wait(5)
        return stream(line("late"))(request)

    worker = WorkerView(id="echo-1/1/0", index=0, node="n", devices=(0,), status="starting")
    unstarted = run_view(workers=(worker,), spec=RunSpec(command=("echo",), env=env))

    def run(request: httpx.Request) -> httpx.Response:
        in_watch = threading.current_thread() is not threading.main_thread()
        return httpx.Response(200, content=msgspec.json.encode(unstarted if in_watch else ENDED))

    why = Reason(code="workers-starting" if "no process" in said else "placed", text=said)
    answers = {LOGS: logs, RUN: run, OUTPUTS: NO_OUTPUTS, "GET /v1/cluster": cluster, "GET /v1/runs/echo-1/why": why}
    stage = Stage(tmp_path, answers)
    assert follow(stage.client, unstarted, quiet=quiet) == 0
    out, err = capsys.readouterr()
    assert out == "late\n"
    talk = [text for text in err.splitlines() if "submitted" not in text]
    assert talk == [f"racimo: echo-1 waits for its workers, which have not started for 0 s: {said}"]
