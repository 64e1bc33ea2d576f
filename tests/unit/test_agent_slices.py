"""Slices through an agent: none lost or told twice, whoever dies; and what a slice goes on from is brought first."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from peer_stage import BIG, hosts, play

from racimo.agent.entry import Entry
from racimo.agent.frames import FrameBuffer
from racimo.agent.kept import Kept, keep, newest_kept, trial_folder
from racimo.agent.protocol import PeerAddress, Report, RunSlice, SliceDone, SliceOrder, StateAt, WorkerOrder
from racimo.agent.runs import Runs
from racimo.agent.slices import Slices, newest_result, note_begun
from racimo.agent.spool import Spool
from racimo.agent.states import States
from racimo.spec.home import Home
from racimo.state.events import SliceEnded
from racimo.state.trials import Grant, Result
from racimo.worker.tune.trial import write_result

RUN = "tune-1"


class Wire:
    """A worker's connection, as its agent writes to it."""

    def __init__(self) -> None:
        self._frames = FrameBuffer()
        self.slices: list[int] = []

    def write(self, frame: bytes) -> None:
        for body in self._frames.feed(frame):
            self.slices.append(msgspec.msgpack.decode(body, type=RunSlice).order.grant.number)

    def is_closing(self) -> bool:
        return False


class AgentStage:
    """One agent's slices over a folder; `again` is the agent after it. `elsewhere`: what other nodes answer."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = Home(root / "home")
        self.elsewhere: dict[tuple[str, int], Kept | None] = {}
        self.asked: list[tuple[str, int, int]] = []
        self.wire = Wire()
        self.begin()

    def begin(self) -> None:
        self.spool = Spool(self.root / "events")
        self.slices = Slices(self.spool, States(self.home, "n1", self._fetch))
        directory = self.root / "worker"
        directory.mkdir(exist_ok=True)
        self.entry = Entry(order=WorkerOrder(worker=f"{RUN}/1/0", kind="tune"), directory=directory)
        self.wire = Wire()
        self.entry.writer = self.wire  # type: ignore[assignment]

    async def _fetch(self, peer: PeerAddress, run: str, trial: int, least: int, folder: Path) -> Kept | None:
        self.asked.append((peer.node, trial, least))
        found = self.elsewhere.get((peer.node, trial))
        return put(folder, found.rounds) if found is not None and found.rounds >= least else None

    @property
    def told(self) -> list[tuple[int, int]]:
        """(slice, rounds) of each result in the spool."""
        events = self.spool.pending.values()
        return [(event.number, event.result.rounds) for event in events if isinstance(event, SliceEnded)]

    def folder(self, trial: int) -> Path:
        return trial_folder(self.home.output_dir(RUN), trial)

    async def settle(self) -> None:
        await asyncio.gather(*self.slices._bringing)


def put(folder: Path, rounds: int, content: bytes = b"state") -> Kept:
    return keep(folder, rounds, "pickle", lambda file: file.write(content) and None)


def order(number: int, trial: int = 0, *states: StateAt, state_of: int | None = None, saved: int = 0) -> RunSlice:
    grant = Grant(number=number, trial=trial, worker=0, state_of=state_of)
    return RunSlice(worker=f"{RUN}/1/0", order=SliceOrder(grant=grant, values={}, states=states, saved=saved))


def done(number: int, rounds: int = 1) -> SliceDone:
    return SliceDone(number=number, result=Result(outcome="reached", rounds=rounds))


def at(node: str, trial: int = 0) -> StateAt:
    return StateAt(trial=trial, node=node, peer=PeerAddress(node=node, address="a", port=1, pin=""))


@pytest.fixture
def stage(tmp_path: Path) -> AgentStage:
    return AgentStage(tmp_path)


def test_a_slice_that_comes_twice_is_passed_on_once(stage: AgentStage) -> None:
    for number in (1, 1, 2, 1):
        stage.slices.order(stage.entry, order(number))
    assert stage.wire.slices == [1, 2]


def test_a_worker_that_connects_again_is_told_what_it_may_have_missed(stage: AgentStage) -> None:
    stage.slices.order(stage.entry, order(1))
    stage.slices.connected(stage.entry)
    stage.slices.done(stage.entry, done(1))
    stage.slices.connected(stage.entry)
    assert stage.wire.slices == [1, 1]


def test_a_result_said_again_is_told_once(stage: AgentStage) -> None:
    for number in (1, 1, 2, 1, 2):
        stage.slices.done(stage.entry, done(number))
    assert stage.told == [(1, 1), (2, 1)]


def test_the_next_agent_tells_a_result_no_second_time_while_it_is_in_the_spool(stage: AgentStage) -> None:
    stage.slices.done(stage.entry, done(1))
    stage.begin()
    stage.slices.done(stage.entry, done(1))
    assert stage.told == [(1, 1)]


def test_what_a_dead_worker_wrote_and_nobody_heard_is_told_at_its_end(stage: AgentStage) -> None:
    """Both die at once: the result was in the worker's file before it was said."""
    stage.slices.done(stage.entry, done(1))
    stage.spool.acknowledge(stage.spool.newest)
    write_result(stage.entry.directory, done(1))
    write_result(stage.entry.directory, done(2, rounds=9))
    stage.begin()
    stage.slices.ended(stage.entry)
    assert stage.told == [(2, 9)]


def test_a_slice_that_its_worker_did_not_begin_goes_back_as_it_was(stage: AgentStage) -> None:
    """Its trial was not tried: that the worker died is not held against it."""
    stage.slices.order(stage.entry, order(1))
    note_begun(stage.entry.directory, 1)
    write_result(stage.entry.directory, done(1, rounds=4))
    stage.slices.order(stage.entry, order(2, 5))
    stage.slices.ended(stage.entry)
    events = [event for event in stage.spool.pending.values() if isinstance(event, SliceEnded)]
    assert [(event.number, event.result.outcome) for event in events] == [(1, "reached"), (2, "halted")]


def test_a_slice_that_was_begun_and_has_no_result_is_lost(stage: AgentStage) -> None:
    stage.slices.order(stage.entry, order(1))
    note_begun(stage.entry.directory, 1)
    stage.slices.ended(stage.entry)
    assert stage.told == []


def test_a_torn_line_hides_no_result(stage: AgentStage) -> None:
    write_result(stage.entry.directory, done(1))
    file = stage.entry.directory / "slices.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"number":2,"resu')
    assert newest_result(stage.entry.directory) == done(1)
    write_result(stage.entry.directory, done(3))  # behind the torn one: they are one line now
    assert newest_result(stage.entry.directory) == done(1)
    write_result(stage.entry.directory, done(4))
    assert newest_result(stage.entry.directory) == done(4)


def test_a_trial_that_was_elsewhere_last_gets_its_state_before_its_worker_gets_the_slice(stage: AgentStage) -> None:
    async def scene() -> None:
        put(stage.folder(0), 3)  # from an earlier stay here
        stage.elsewhere["n2", 0] = Kept(9, Path())
        stage.slices.order(stage.entry, order(1, 0, at("n2"), saved=9))
        assert stage.wire.slices == []
        await stage.settle()
        assert stage.wire.slices == [1]
        assert newest_kept(stage.folder(0)) == Kept(9, stage.folder(0) / "after-9-rounds.pickle")
        assert stage.asked == [("n2", 0, 3)]

    play(scene)


def test_a_slice_lost_on_one_node_goes_on_from_where_it_was_surely_saved(stage: AgentStage) -> None:
    async def scene() -> None:
        stage.elsewhere["n2", 0] = None  # died there before its state had come
        stage.elsewhere["n3", 0] = Kept(5, Path())
        stage.slices.order(stage.entry, order(1, 0, at("n2"), at("n3"), saved=5))
        await stage.settle()
        assert stage.wire.slices == [1]
        assert (newest_kept(stage.folder(0)) or Kept(0, Path())).rounds == 5

    play(scene)


def test_where_nobody_has_the_state_the_trial_begins_anew(
    stage: AgentStage, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scene() -> None:
        stage.slices.order(stage.entry, order(1, 0, at("n2"), saved=5))
        await stage.settle()
        assert stage.wire.slices == [1]

    play(scene)
    assert "begins anew" in capsys.readouterr().err


def test_a_clone_begins_with_a_copy_of_its_parents_state(stage: AgentStage) -> None:
    """ray#9036: its parent goes on, and drops what it had saved, while the clone reads."""

    async def scene() -> None:
        put(stage.folder(4), 7, b"parent's")
        stage.slices.order(stage.entry, order(1, 8, at("n1", trial=4), state_of=4))
        await stage.settle()
        put(stage.folder(4), 8)
        kept = newest_kept(stage.folder(8))
        assert kept is not None
        assert (kept.rounds, kept.path.read_bytes()) == (7, b"parent's")

    play(scene)


def test_a_clone_that_has_gone_on_is_not_set_back(stage: AgentStage) -> None:
    async def scene() -> None:
        put(stage.folder(4), 7)
        put(stage.folder(8), 9)
        stage.slices.order(stage.entry, order(2, 8, at("n1", trial=8), at("n1", trial=4), state_of=4))
        await stage.settle()
        assert (newest_kept(stage.folder(8)) or Kept(0, Path())).rounds == 9

    play(scene)


def test_a_slice_for_a_worker_that_ended_meanwhile_is_not_sent(stage: AgentStage) -> None:
    async def scene() -> None:
        stage.slices.order(stage.entry, order(1, 0, at("n2"), saved=5))
        stage.slices.ended(stage.entry)
        await stage.settle()
        assert stage.wire.slices == []

    play(scene)


@pytest.mark.parametrize("size_bytes", [0, 10, BIG])
def test_a_state_goes_from_agent_to_agent_as_a_whole(tmp_path: Path, size_bytes: int) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 2) as (one, other):
            content = b"x" * size_bytes
            put(trial_folder(one.home.output_dir(RUN), 3), 12, content)
            folder = trial_folder(other.home.output_dir(RUN), 3)
            put(folder, 5)
            fetched = await other.neighbours.fetch_state(one.peer, RUN, 3, 5, folder)
            assert fetched == newest_kept(folder)
            assert fetched is not None
            assert (fetched.rounds, fetched.path.read_bytes()) == (12, content)
            assert [path.name for path in folder.iterdir()] == ["after-12-rounds.pickle"]
            assert fetched.path.stat().st_mode & 0o777 == 0o600

    play(scene)


def test_a_state_that_is_not_there_or_too_old_is_not_sent(tmp_path: Path) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 2) as (one, other):
            put(trial_folder(one.home.output_dir(RUN), 3), 4)
            for run, trial, least in ((RUN, 3, 5), (RUN, 4, 0), ("../x", 3, 0)):
                assert await other.neighbours.fetch_state(one.peer, run, trial, least, tmp_path / "here") is None

    play(scene)


def test_an_agent_that_is_gone_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        async with hosts(tmp_path, 2) as (one, other):
            await one.neighbours.close()
            assert await other.neighbours.fetch_state(one.peer, RUN, 3, 0, tmp_path / "here") is None

    play(scene)
    assert "cannot be reached" in capsys.readouterr().err


def report(trial: int | None, step: int, **values: float) -> Report:
    return Report(step=step, values=values, trial=trial)


def test_the_first_report_of_each_trial_step_and_name_counts_also_after_a_restart(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for _ in range(2):
        runs = Runs(home)
        for one in (report(0, 1, a=1.0), report(1, 1, a=2.0), report(0, 1, a=9.0, b=3.0), report(None, 1, a=4.0)):
            runs.report(RUN, one)
        lines = runs.read_reports(RUN, 0, 100).reports
        assert lines == (report(0, 1, a=1.0), report(1, 1, a=2.0), report(0, 1, b=3.0), report(None, 1, a=4.0))
        runs.close()


def test_values_that_json_has_no_number_for_survive_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        runs = Runs(Home(tmp_path))
        runs.report(RUN, report(0, 1, a=float("nan"), b=float("inf"), c=float("-inf"), d=0.5))
        (line,) = runs.read_reports(RUN, 0, 100).reports
        assert {name: str(value) for name, value in line.values.items()} == {
            "a": "nan", "b": "inf", "c": "-inf", "d": "0.5"
        }  # fmt: skip
        runs.close()


def test_a_line_torn_by_a_kill_is_cut_off(tmp_path: Path) -> None:
    runs = Runs(Home(tmp_path))
    runs.report(RUN, report(0, 1, a=1.0))
    runs.close()
    file = Home(tmp_path).node_dir / "runs" / RUN / "reports.jsonl"
    file.write_bytes(file.read_bytes() + b'{"step":2,"val')
    for expected in (2, 2):
        runs = Runs(Home(tmp_path))
        runs.report(RUN, report(0, 3, a=1.0))
        assert len(runs.read_reports(RUN, 0, 100).reports) == expected
        runs.close()
