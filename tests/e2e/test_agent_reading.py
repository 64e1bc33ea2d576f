"""What a real agent lets the control process read, and whose turn it is on a device."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import RealAgent

from racimo.agent.protocol import (
    ListOutputs,
    LogBatch,
    OutputChunk,
    OutputList,
    PullLogs,
    ReadLog,
    ReadOutput,
    StopWorker,
    WorkerOrder,
)
from racimo.spec.errors import RacimoError
from racimo.state.events import WorkerExited, WorkerStarted

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealAgent]:
    real = RealAgent(tmp_path_factory.mktemp("agent") / "home")
    yield real
    real.close()


def test_outputs_are_listed_and_read_in_pieces_and_nothing_else_is(agent: RealAgent) -> None:
    agent.run("out/1/0", "sh", "-c", "cd $RACIMO_OUTPUT_DIR; printf 0123456789 > a; ln -s /etc/passwd out; ln -s a in")
    assert agent.exit("out/1/0").code == 0
    listed = agent.request(ListOutputs(run="out"))
    assert isinstance(listed, OutputList)
    assert [(file.path, file.size_bytes) for file in listed.files] == [("a", 10), ("in", 10)]
    assert agent.request(ReadOutput(run="out", path="a", offset=4, limit=3)) == OutputChunk(
        content=b"456", size_bytes=10
    )
    for run, path in (("out", "out"), ("out", "../out/a"), ("out", "none"), ("none", "a")):
        with pytest.raises(RacimoError) as caught:
            agent.request(ReadOutput(run=run, path=path))
        assert caught.value.code == "output-missing"
    for run in ("", "..", "out/../out"):
        with pytest.raises(RacimoError) as caught:
            agent.request(ListOutputs(run=run))
        assert caught.value.code == "invalid-request"


def test_what_workers_print_is_pulled_as_it_comes(agent: RealAgent) -> None:
    cursor, text = 0, b""
    agent.run("said/1/0", "sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.05; done; echo end >&2")
    while b"end\n" not in text:
        batch = agent.request(PullLogs(after=cursor, wait_s=5.0))
        assert isinstance(batch, LogBatch) and (batch.pieces or batch.reported)
        text += b"".join(piece.content for piece in batch.pieces if piece.worker == "said/1/0")
        cursor = batch.next
    assert text == b"1\n2\n3\nend\n"


def test_commits_are_read_like_a_log(agent: RealAgent) -> None:
    agent.run("steps/1/0", "true")
    agent.exit("steps/1/0")
    Path(agent.home.worker_dir("steps/1/0"), "steps.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n')
    chunk = agent.request(ReadLog(worker="steps/1/0", stream="steps", offset=-12, limit=100))
    assert chunk.content == b'{"step": 2}\n'  # type: ignore[union-attr]


def test_the_next_on_a_device_waits_for_the_one_before_to_be_gone(agent: RealAgent) -> None:
    """ray#31451, #32725: whatever was ended without being gone keeps its device from everybody else."""
    agent.run("held/1/0", "sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done", devices=(0,))
    agent.wait_for_line("held/1/0", "up")
    agent.start(WorkerOrder(worker="next/1/0", kind="command", command=("true",), devices=(0,)))
    agent.run("free/1/0", "true", devices=(1,))
    assert agent.exit("free/1/0").code == 0
    agent.request(StopWorker(worker="held/1/0", how="stop", grace_s=0.3))
    assert agent.exit("next/1/0").code == 0
    order = [(type(one.event), one.event.run) for one in agent.events if one.event.run in ("held", "next")]
    assert order.index((WorkerExited, "held")) < order.index((WorkerStarted, "next"))


def test_one_that_waits_for_a_device_can_be_stopped(agent: RealAgent) -> None:
    agent.run("holds/1/0", "sleep", "300", devices=(2,))
    agent.started("holds/1/0")
    agent.start(WorkerOrder(worker="waits/1/0", kind="command", command=("true",), devices=(2,)))
    agent.request(StopWorker(worker="waits/1/0", how="stop"))
    assert agent.exit("waits/1/0").outcome == "killed"
    agent.request(StopWorker(worker="holds/1/0", how="abort"))
    agent.exit("holds/1/0")
