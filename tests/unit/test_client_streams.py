"""Streams go on after the control process was killed: no line twice, none left out."""

from pathlib import Path

import httpx
import pytest
from client_stage import CUT, Stage, Turns, run_view, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from racimo.client.streams import position_after
from racimo.control.views import LogLine, RunProgress
from racimo.spec.errors import RacimoError
from racimo.state.events import Record, StopRequested
from racimo.state.nouns import Exit

LOGS, RUN = "GET /v1/runs/r-1/logs", "GET /v1/runs/r-1"
ENDED = run_view(status="succeeded")


def line(text: str, worker: int = 0, stream: str = "out") -> LogLine:
    return LogLine(worker=f"r-1/1/{worker}", stream=stream, text=text)


def texts(stage: Stage, **settings: object) -> list[str]:
    return [one.text for one in stage.client.logs("r-1", **settings)]  # type: ignore[arg-type]


def test_without_follow_the_log_is_read_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {LOGS: stream(line("a"), b"\n", line("b"))})
    assert texts(stage) == ["a", "b"]
    assert dict(stage.requests[0].url.params) == {"follow": "0"}


def test_a_cut_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    first = stream(line("a"), line("x", 1), line("e", stream="err"), line("b"), CUT)
    # after the restart the merged order may differ; per worker and stream it does not
    second = stream(line("e", stream="err"), line("a"), line("b"), line("c"), line("x", 1), line("y", 1))
    stage = Stage(tmp_path, {LOGS: Turns(first, httpx.ConnectError("refused"), second), RUN: ENDED})
    assert texts(stage, follow=True) == ["a", "x", "e", "b", "c", "y"]


def test_equal_lines_are_all_shown(tmp_path: Path) -> None:
    first, second = stream(line("same"), line("same"), CUT), stream(*[line("same")] * 4)
    stage = Stage(tmp_path, {LOGS: Turns(first, second), RUN: ENDED})
    assert texts(stage, follow=True) == ["same"] * 4


def test_a_stream_that_ends_although_the_run_goes_on_is_taken_up_again(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path,
        {LOGS: Turns(stream(line("a")), stream(line("a"), line("b"))), RUN: Turns(run_view(), ENDED)},
    )
    assert texts(stage, follow=True) == ["a", "b"]


def test_a_tail_goes_on_by_the_newest_lines_seen(tmp_path: Path) -> None:
    old = [line(str(number)) for number in range(100)]
    stage = Stage(
        tmp_path,
        {
            LOGS: Turns(
                stream(*old[-2:], line("new 1"), CUT),
                stream(*old, line("new 1"), line("new 2")),  # read once, to find the place
                stream(*old, line("new 1"), line("new 2"), line("new 3")),
            ),
            RUN: ENDED,
        },
    )
    assert texts(stage, follow=True, tail=2) == ["98", "99", "new 1", "new 2", "new 3"]
    assert [dict(r.url.params) for r in stage.requests if r.url.path.endswith("logs")] == [
        {"follow": "1", "tail": "2"}, {"follow": "0"}, {"follow": "1"},
    ]  # fmt: skip


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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("ab"), max_size=12), st.data())
def test_the_place_found_follows_the_lines_seen(log: list[str], data: st.DataObject) -> None:
    seen = data.draw(st.integers(0, len(log)))
    newest = log[max(0, seen - 3) : seen]
    place = position_after(log, newest)
    assert not newest or log[place - len(newest) : place] == newest
    assert place >= seen or not newest
