"""The proposing process: what it answers, what it asks back, and how a user's own proposer fails."""

import os
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from racimo.agent.frames import FrameBuffer, encode_frame
from racimo.agent.propose_protocol import Proposed, ProposerAsk
from racimo.agent.protocol import WorkerHello, WorkerMessage
from racimo.spec.proposer import Outcome, window_from
from racimo.spec.study import StudySpec
from racimo.worker.tune.propose_answers import Answers
from racimo.worker.tune.propose_process import _Connection

OWN = """
class Halves:
    def __init__(self, space, objectives, seed):
        self.told, self.forgotten = {}, []

    def tell(self, results):
        self.told |= {one.number: one for one in results}

    def forget(self, numbers):
        self.forgotten += numbers
        for number in numbers:
            del self.told[number]

    def ask(self, count):
        return [{"x": 1.0 / (2 + len(self.told) + n)} for n in range(count)]

class Raises(Halves):
    def ask(self, count):
        return [self.missing_name]

class RaisesAtOnce(Halves):
    def __init__(self, space, objectives, seed):
        raise ValueError("no licence")

class Leaves(Halves):
    def ask(self, count):
        raise SystemExit(3)

class Text(Halves):
    def ask(self, count):
        return "x=1"

class Numpy(Halves):
    def ask(self, count):
        import numpy
        return [{"x": numpy.float64(0.25)}]

class Odd(Halves):
    def ask(self, count):
        return [{"x": [0.5]}]

class Nothing(Halves):
    def ask(self, count):
        return []

class NoAsk:
    def __init__(self, space, objectives, seed): ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def terms(name: str) -> StudySpec:
    return StudySpec(space={"x": "0.0..1.0"}, metric="loss", proposer=f"own.py:{name}")


def question(number: int = 1, first: int = 0, name: str | None = "Halves", **more: Any) -> ProposerAsk:
    given = terms(name) if name is not None else None
    return ProposerAsk(number=number, first=first, count=more.pop("count", 1), seed=0, terms=given, **more)


def outcomes(*numbers: int) -> tuple[Outcome, ...]:
    return tuple(
        Outcome(number=n, values={"x": 0.5}, status="finished", rounds=1, metrics={"loss": 1.0}) for n in numbers
    )


def xs(proposed: Proposed) -> list[Any]:
    assert proposed.failure is None, proposed.failure
    return [proposal.values["x"] for proposal in proposed.proposals]


def test_a_users_own_proposer_is_told_what_is_known_and_asked(folder: Path) -> None:
    answers = Answers(folder, "r/1/9")
    told = answers.answer(question(first=2, count=2, outcomes=outcomes(0, 1)))
    assert xs(told) == [1 / 4, 1 / 5] and told.proposals[0].by == "own.py:Halves"
    assert xs(answers.answer(question(2, first=3, name=None, outcomes=outcomes(2)))) == [1 / 5]


def test_a_process_that_knows_nothing_says_so(folder: Path) -> None:
    answers = Answers(folder, "r/1/9")
    assert answers.answer(question(7, name=None)) == Proposed(number=7, needs_terms=True)
    lacking = answers.answer(question(8, first=4, outcomes=outcomes(1)))
    assert lacking == Proposed(number=8, missing=(0, 2, 3))
    assert xs(answers.answer(question(9, first=4, outcomes=outcomes(0, 1, 2, 3)))) == [1 / 6]


def test_what_leaves_the_window_is_forgotten(folder: Path) -> None:
    answers = Answers(folder, "r/1/9")
    answers.answer(question(first=5, outcomes=outcomes(*range(5))))
    told = answers.answer(question(2, first=5, name=None, newest_from=3, best=(1,)))
    assert xs(told) == [1 / 5]
    proposer: Any = answers._proposer
    assert sorted(proposer.forgotten) == [0, 2] and sorted(proposer.told) == [1, 3, 4]


def test_other_terms_begin_a_new_proposer(folder: Path) -> None:
    answers = Answers(folder, "r/1/9")
    answers.answer(question(first=2, outcomes=outcomes(0, 1)))
    assert answers.answer(question(2, first=2, name="Numpy")).missing == (0, 1)
    assert xs(answers.answer(question(3, first=2, name="Numpy", outcomes=outcomes(0, 1)))) == [0.25]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Raises", "own.py:Raises raised AttributeError: 'Raises' object has no attribute 'missing_name' (own.py:"),
        ("RaisesAtOnce", "own.py:RaisesAtOnce raised ValueError: no licence (own.py:"),
        ("Leaves", "raised SystemExit: 3"),
        ("Text", "returns a list of points, not 'x=1'"),
        ("Odd", "gave x the value [0.5], a list"),
        ("NoAsk", "has no ask(count) and tell(results)"),
        ("Missing", "own.py has no class Missing; it has "),
    ],
)
def test_a_proposer_that_fails_is_told_with_its_words(folder: Path, name: str, words: str) -> None:
    failure = Answers(folder, "r/1/9").answer(question(name=name)).failure
    assert failure is not None and failure.code == "proposer-failed"
    assert words in failure.message


def test_the_traceback_of_a_users_proposer_comes_along(folder: Path) -> None:
    failure = Answers(folder, "r/1/9").answer(question(name="Raises")).failure
    assert failure is not None and 'File "own.py"' in failure.traceback and "missing_name" in failure.traceback


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    failure = Answers(tmp_path, "r/1/9").answer(question()).failure
    assert failure is not None and failure.message == "there is no file own.py among the run's files"


def test_no_points_are_no_failure(folder: Path) -> None:
    assert Answers(folder, "r/1/9").answer(question(5, name="Nothing")) == Proposed(number=5)


def test_the_window_moves_in_steps() -> None:
    assert [window_from(n) for n in (0, 300, 399, 400, 499, 100_000)] == [0, 0, 0, 100, 100, 99_700]


def test_the_process_answers_over_its_connection_across_agents_and_ends_when_idle(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    decode = msgspec.msgpack.Decoder(WorkerHello | WorkerMessage).decode

    def accept(listener: socket.socket) -> tuple[socket.socket, FrameBuffer]:
        connection, _ = listener.accept()
        return connection, FrameBuffer()

    def receive(connection: socket.socket, frames: FrameBuffer) -> Any:
        while not (bodies := frames.feed(connection.recv(65_536))):
            pass
        return decode(bodies[0])

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(path))
    listener.listen()
    served = _Connection(os.fspath(path), "r/1/9", Answers(folder, "r/1/9"), idle_most_s=1.0)
    thread = threading.Thread(target=served.serve)
    thread.start()
    for number in (1, 2):  # the second time as another agent would
        connection, frames = accept(listener)
        assert receive(connection, frames) == WorkerHello(worker="r/1/9", pid=os.getpid())
        connection.sendall(encode_frame(question(number)))
        assert receive(connection, frames).number == number
        if number == 1:
            connection.close()
    thread.join(10.0)
    assert not thread.is_alive(), "it ends when nobody asks"
    connection.close()
    listener.close()
