"""Streams go on after the control process was killed: no line twice, none left out."""

from pathlib import Path

import httpx
import pytest
from client_stage import CUT, Stage, Turns, run_view, stream

from racimo.control.views import LogLine, RunProgress
from racimo.spec.errors import RacimoError
from racimo.state.events import Record, StopRequested
from racimo.state.nouns import Exit

LOGS, RUN = "GET /v1/runs/r-1/logs", "GET /v1/runs/r-1"
ENDED = run_view(status="succeeded")


def line(text: str, worker: int = 0, stream: str = "out", *, at: int = 0) -> LogLine:
    """`at`: which line of its stream it is, from 1 on; 0 is a word of ours."""
    return LogLine(worker=f"r-1/1/{worker}", stream=stream, text=text, offset=10 * at)


def asked(stage: Stage) -> list[dict[str, str]]:
    return [dict(request.url.params) for request in stage.requests if request.url.path.endswith("logs")]


def texts(stage: Stage, **settings: object) -> list[str]:
    return [one.text for one in stage.client.logs("r-1", **settings)]  # type: ignore[arg-type]


def test_without_follow_the_log_is_read_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {LOGS: stream(line("a"), b"\n", line("b"))})
    assert texts(stage) == ["a", "b"]
    assert dict(stage.requests[0].url.params) == {"follow": "0"}


def test_a_cut_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    """kuberay#1047, ray#44561: a restart of the head loses no line, and nothing is read again for it."""
    first = stream(line("a", at=1), line("x", 1, at=1), line("e", stream="err", at=1), line("b", at=2), CUT)
    second = stream(line("c", at=3), line("y", 1, at=2))
    stage = Stage(tmp_path, {LOGS: Turns(first, httpx.ConnectError("refused"), second), RUN: ENDED})
    assert texts(stage, follow=True) == ["a", "x", "e", "b", "c", "y"]
    assert asked(stage)[-1] == {"follow": "1", "from": "1/1:10:0;1/0:20:10"}


def test_lines_that_come_again_all_the_same_are_dropped(tmp_path: Path) -> None:
    first = stream(line("a", at=1), line("b", at=2), CUT)
    second = stream(line("n", at=0), line("a", at=1), line("b", at=2), line("b", at=3), line("n", at=0))
    stage = Stage(tmp_path, {LOGS: Turns(first, second), RUN: ENDED})
    assert texts(stage, follow=True) == ["a", "b", "n", "b"]


def test_more_workers_than_an_address_holds_are_read_again_and_shown_once(tmp_path: Path) -> None:
    all_lines = [line(str(index), index, at=1) for index in range(4_000)]
    stage = Stage(
        tmp_path, {LOGS: Turns(stream(*all_lines, CUT), stream(*all_lines, line("new", 7, at=2))), RUN: ENDED}
    )
    assert texts(stage, follow=True) == [*(one.text for one in all_lines), "new"]
    assert 30_000 < len(asked(stage)[-1]["from"]) < 32_000


def test_a_stream_that_ends_although_the_run_goes_on_is_taken_up_again(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path,
        {LOGS: Turns(stream(line("a", at=1)), stream(line("b", at=2))), RUN: Turns(run_view(), ENDED)},
    )
    assert texts(stage, follow=True) == ["a", "b"]


@pytest.mark.parametrize(("tail", "kept"), [(2, {}), (0, {"tail": "0"})])
def test_a_tail_goes_on_behind_the_newest_lines_seen(tmp_path: Path, tail: int, kept: dict[str, str]) -> None:
    first = stream(line("98", at=98), line("99", at=99), CUT)
    stage = Stage(tmp_path, {LOGS: Turns(first, stream(line("100", at=100))), RUN: ENDED})
    assert texts(stage, follow=True, tail=tail) == ["98", "99", "100"]
    assert asked(stage) == [{"follow": "1", "tail": str(tail)}, {"follow": "1", "from": "1/0:990:0", **kept}]


def test_a_tail_that_was_cut_before_its_first_line_begins_anew(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {LOGS: Turns(stream(CUT), stream(line("99", at=99))), RUN: ENDED})
    assert texts(stage, follow=True, tail=1) == ["99"]
    assert asked(stage) == [{"follow": "1", "tail": "1"}] * 2


def test_without_a_supervisor_a_cut_stream_is_an_error(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {LOGS: stream(line("a"), CUT), RUN: ENDED}, supervised=False)
    lines = stage.client.logs("r-1", follow=True)
    assert next(lines).text == "a"
    with pytest.raises(RacimoError) as caught:
        next(lines)
    assert caught.value.code == "unreachable"


def record(seq: int) -> Record:
    return Record(seq=seq, at_s=0.0, wall_s=0.0, event=StopRequested(run="r-1"))


def test_events_come_once_each_and_end(tmp_path: Path) -> None:
    first = stream(record(1), record(2), CUT)
    second = stream(record(1), record(2), record(3), {"ended": "stopped"})
    stage = Stage(tmp_path, {"GET /v1/runs/r-1/events": Turns(first, second)})
    assert [one.seq for one in stage.client.events("r-1", follow=True)] == [1, 2, 3]


def test_progress_ends_with_the_run(tmp_path: Path) -> None:
    def at(step: int, status: str) -> RunProgress:
        return RunProgress(run="r-1", status=status, num_workers=1, step=step)

    parts = Turns(stream(at(1, "running"), CUT), stream(at(2, "running"), b"\n", at(3, "succeeded")))
    stage = Stage(tmp_path, {"GET /v1/runs/r-1/progress": parts})
    assert [one.step for one in stage.client.progress("r-1", follow=True)] == [1, 2, 3]


def test_exec_gives_lines_and_the_exit_last(tmp_path: Path) -> None:
    over = Exit(outcome="finished", code=0)
    stage = Stage(tmp_path, {"POST /v1/runs/r-1/exec": stream(line("out"), {"exit": over})})
    assert list(stage.client.exec("r-1", ["ls"], 1)) == [line("out"), over]
    assert stage.bodies("POST", "/v1/runs/r-1/exec") == [{"command": ["ls"], "worker": "1"}]


def test_an_exec_that_was_cut_is_not_run_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"POST /v1/runs/r-1/exec": stream(line("out"), CUT)})
    with pytest.raises(RacimoError) as caught:
        list(stage.client.exec("r-1", ["rm", "x"]))
    assert caught.value.code == "unreachable" and len(stage.requests) == 1
