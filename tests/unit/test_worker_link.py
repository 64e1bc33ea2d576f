"""A worker's connection to its agent: everything said arrives, in order, also past the death of an agent."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from racimo.agent.frames import FrameBuffer
from racimo.agent.protocol import Report, SliceDone, WorkerContext, WorkerHello, WorkerMessage
from racimo.spec.run import CheckpointSpec
from racimo.state.trials import Result
from racimo.worker.link import AgentLink

_decode = msgspec.msgpack.Decoder(WorkerMessage).decode


class FakeAgent:
    """Listens at a worker's agent socket and hears one connection after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.heard: list[WorkerMessage] = []
        self.changed = threading.Condition()
        self._listener: socket.socket | None = None
        self._connection: socket.socket | None = None
        self.begin()

    def begin(self) -> None:
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(4)
        threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    def die(self) -> None:
        """Everything that was heard so far is forgotten with it."""
        assert self._listener is not None
        self._path.unlink()
        for one in (self._listener, self._connection):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
        with self.changed:
            self.heard.clear()

    def wait(self, num_steps: int) -> list[int]:
        """The steps of all reports, once there are so many different ones."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(set(self.steps)) >= num_steps, 10), len(self.heard)
        return self.steps

    @property
    def steps(self) -> list[int]:
        return [message.step for message in self.heard if isinstance(message, Report)]

    def _serve(self, listener: socket.socket) -> None:
        frames = FrameBuffer()
        with contextlib.suppress(OSError):
            self._connection, _ = listener.accept()
            while piece := self._connection.recv(1 << 16):
                with self.changed:
                    self.heard += [_decode(frame) for frame in frames.feed(piece)]
                    self.changed.notify_all()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    agent = FakeAgent(tmp_path / "s")
    yield agent
    agent.die()


@pytest.fixture
def link(agent: FakeAgent, tmp_path: Path) -> Iterator[AgentLink]:
    context = WorkerContext(
        worker="r/1/0", run="r", attempt=1, index=0, rank=0, world_size=1, least=1, most=1, seed=0, threads=1,
        devices=(), directory=str(tmp_path), output_dir=str(tmp_path), checkpoint=CheckpointSpec(),
        agent_socket=str(tmp_path / "s"), node="n", host="h",
    )  # fmt: skip
    link = AgentLink(context)
    with agent.changed:
        assert agent.changed.wait_for(lambda: agent.heard, 10)
    yield link
    link.close()


def test_more_reports_than_are_kept_while_nobody_listens_all_arrive_in_order(agent: FakeAgent, link: AgentLink) -> None:
    for step in range(30_000):
        link.tell(Report(step=step, values={"loss": 1.0}, trial=0))
    assert agent.wait(30_000) == list(range(30_000))
    assert isinstance(agent.heard[0], WorkerHello)


def test_what_a_dead_agent_may_not_have_written_down_is_said_to_the_next(agent: FakeAgent, link: AgentLink) -> None:
    for step in range(1_000):
        link.tell(Report(step=step, values={"loss": 1.0}, trial=0))
    agent.wait(1_000)
    agent.die()
    done = SliceDone(number=7, result=Result(outcome="reached", rounds=1_000))
    link.tell(done)
    agent.begin()
    assert sorted(set(agent.wait(1_000))) == list(range(1_000))
    with agent.changed:
        assert agent.changed.wait_for(lambda: done in agent.heard, 10)


def test_closing_sends_what_is_left(agent: FakeAgent, link: AgentLink) -> None:
    for step in range(5_000):
        link.tell(Report(step=step, values={"loss": 1.0}))
    link.close()
    assert agent.wait(5_000) == list(range(5_000))
