"""Logs for the control process's copy: everything once, the last MB at most, nothing lost with an answer."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from racimo.agent.entry import Entry
from racimo.agent.inotify import FileWatcher
from racimo.agent.log_tails import LAST_BYTES, LogTails
from racimo.agent.logs import BLOCK_BYTES
from racimo.agent.protocol import LogBatch, PullLogs, Report, WorkerOrder
from racimo.agent.pulse import Pulse
from racimo.agent.runs import Runs
from racimo.spec.home import Home
from racimo.state.nouns import Exit


class Node:
    """Workers as `LogTails` sees them, on a real folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries: dict[str, Entry] = {}
        self.started = Pulse()
        self.files = FileWatcher()
        self.runs = Runs(Home(root / "home"))
        self.tails = self.new_agent()

    def new_agent(self) -> LogTails:
        return LogTails(self, self.runs, self.files)  # type: ignore[arg-type]

    def start(self, worker: str, exec_of: str = "") -> Entry:
        order = WorkerOrder(worker=worker, kind="exec" if exec_of else "command", exec_of=exec_of)
        entry = self.entries[worker] = Entry(order=order, directory=self.root / worker)
        self.started.beat()
        return entry

    @property
    def live(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.live]

    async def write(self, worker: str, content: bytes, stream: str = "out") -> None:
        """Returns once the kernel has told of it."""
        with self.files.watch(self.root / worker) as watch, open(self.root / worker / f"{stream}.log", "ab") as file:
            file.write(content)
            file.flush()
            assert await watch.pulse.wait(5.0)

    async def pull(self, after: int, wait_s: float = 0.0, limit_bytes: int = 4 * 2**20) -> LogBatch:
        return await self.tails.pull(PullLogs(after=after, wait_s=wait_s, limit_bytes=limit_bytes))


def on_a_node(root: Path, check: Callable[[Node], Awaitable[None]]) -> None:
    async def run() -> None:
        node = Node(root)
        try:
            async with asyncio.timeout(20):
                await check(node)
        finally:
            node.tails.close()
            node.files.close()

    asyncio.run(run())


def shown(batch: LogBatch) -> list[tuple[str, str, int, bytes]]:
    return [(piece.worker, piece.stream, piece.offset, piece.content) for piece in batch.pieces]


def test_what_is_written_comes_once_and_at_once(tmp_path: Path) -> None:
    async def check(node: Node) -> None:
        waiting = asyncio.create_task(node.pull(0, wait_s=10.0))
        await asyncio.sleep(0.01)
        node.start("r/1/0")
        await asyncio.sleep(0.01)
        await node.write("r/1/0", b"one\n")
        first = await waiting
        assert shown(first) == [("r/1/0", "out", 0, b"one\n")]
        await node.write("r/1/0", b"two\n")
        await node.write("r/1/0", b"oh\n", "err")
        second = await node.pull(first.next)
        assert sorted(shown(second)) == [("r/1/0", "err", 0, b"oh\n"), ("r/1/0", "out", 4, b"two\n")]
        assert shown(await node.pull(second.next)) == []

    on_a_node(tmp_path, check)


def test_a_batch_whose_answer_was_lost_comes_again(tmp_path: Path) -> None:
    async def check(node: Node) -> None:
        node.start("r/1/0")
        first = await node.pull(0)
        await node.write("r/1/0", b"one\n")
        lost = await node.pull(first.next)
        assert lost.pieces
        await node.write("r/1/0", b"two\n")
        again = await node.pull(first.next)
        assert shown(again) == [("r/1/0", "out", 0, b"one\ntwo\n")]
        assert shown(await node.pull(again.next)) == []

    on_a_node(tmp_path, check)


def test_a_pull_that_is_cut_off_in_the_middle_acknowledges_nothing(tmp_path: Path) -> None:
    async def check(node: Node) -> None:
        node.start("r/1/0")
        first = await node.pull(0)
        await node.write("r/1/0", b"one\n")
        cut = asyncio.create_task(node.pull(first.next))
        await asyncio.sleep(0)
        cut.cancel()
        await asyncio.gather(cut, return_exceptions=True)
        assert shown(await node.pull(first.next)) == [("r/1/0", "out", 0, b"one\n")]

    on_a_node(tmp_path, check)


def test_of_a_long_log_the_last_mb_comes_and_the_offset_says_so(tmp_path: Path) -> None:
    async def check(node: Node) -> None:
        node.start("r/1/0")
        first = await node.pull(0)
        await node.write("r/1/0", b"x" * (3 * LAST_BYTES + 100))
        (piece,) = (await node.pull(first.next)).pieces
        assert piece.offset % BLOCK_BYTES == 0
        assert LAST_BYTES - BLOCK_BYTES <= len(piece.content) <= LAST_BYTES
        assert piece.offset + len(piece.content) == 3 * LAST_BYTES + 100

    on_a_node(tmp_path, check)


def test_a_commit_wakes_nobody(tmp_path: Path) -> None:
    async def check(node: Node) -> None:
        node.start("r/1/0")
        cursor = (await node.pull(0)).next
        await node.write("r/1/0", b"one\n")
        cursor = (await node.pull(cursor)).next
        await node.pull(cursor)
        with node.files.watch(tmp_path / "r/1/0") as watch:
            (tmp_path / "r/1/0/steps.jsonl").write_bytes(b'{"step": 1}\n')
            assert await watch.pulse.wait(5.0)
        assert not any(tail.changed for tail in node.tails._each())

    on_a_node(tmp_path, check)


def test_who_writes_much_does_not_keep_others_from_being_heard(tmp_path: Path) -> None:
    async def check(node: Node) -> None:
        node.start("r/1/0")
        node.start("r/1/1")
        cursor = (await node.pull(0)).next
        await node.write("r/1/0", b"x" * 300_000)
        await node.write("r/1/1", b"here\n")
        heard: list[str] = []
        for _ in range(2):
            batch = await node.pull(cursor, limit_bytes=100_000)
            cursor = batch.next
            heard += [piece.worker for piece in batch.pieces]
            assert sum(len(piece.content) for piece in batch.pieces) <= 100_000
        assert heard[1] == "r/1/1"

    on_a_node(tmp_path, check)


def test_a_new_agent_and_a_forgetful_control_begin_with_the_last_mb_of_who_lives_or_ended_lately(
    tmp_path: Path,
) -> None:
    async def check(node: Node) -> None:
        old = node.start("old/1/0")
        node.start("r/1/0")
        node.start("r/1/1000000", exec_of="r/1/0")
        batch = await node.pull(0)
        await node.write("r/1/0", b"one\n")
        await node.write("old/1/0", b"bye\n")
        batch = await node.pull(batch.next)
        assert len(batch.pieces) == 2
        old.exit = Exit(outcome="finished")
        old.directory.touch()
        node.tails.close()
        node.tails = node.new_agent()
        again = await node.pull(batch.next)
        assert sorted(shown(again)) == [("old/1/0", "out", 0, b"bye\n"), ("r/1/0", "out", 0, b"one\n")]
        node.tails.close()
        node.tails = LogTails(node, node.runs, node.files, lambda: old.directory.stat().st_mtime + 7200)  # type: ignore[arg-type]
        assert [piece.worker for piece in (await node.pull(0)).pieces] == ["r/1/0"]

    on_a_node(tmp_path, check)


def test_ended_and_forgotten_workers_are_let_go(tmp_path: Path) -> None:
    async def check(node: Node) -> None:
        entry = node.start("r/1/0")
        batch = await node.pull(0)
        await node.write("r/1/0", b"last words\n")
        entry.exit = Exit(outcome="finished")
        batch = await node.pull(batch.next)
        assert batch.pieces
        await node.pull(batch.next)
        assert not node.tails._watches
        del node.entries["r/1/0"]
        await node.pull(batch.next)
        assert not node.tails._tails

    on_a_node(tmp_path, check)


def test_a_second_pull_ends_the_first(tmp_path: Path) -> None:
    async def check(node: Node) -> None:
        node.start("r/1/0")
        cursor = (await node.pull(0)).next
        first = asyncio.create_task(node.pull(cursor, wait_s=60.0))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(node.pull(cursor, wait_s=10.0))
        assert (await first).pieces == ()
        await node.write("r/1/0", b"one\n")
        assert len((await second).pieces) == 1

    on_a_node(tmp_path, check)


def test_who_reports_is_told_in_bundles_until_that_has_arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("racimo.agent.log_tails.REPORTS_DELAY_S", 0.02)

    async def check(node: Node) -> None:
        node.start("r/1/0")
        first = await node.pull(0)
        assert first.reported == ("r",)  # whatever there was before
        node.runs.report("r", Report(step=1, values={"loss": 1.0}))
        node.runs.report("s", Report(step=1, values={"loss": 1.0}))
        lost = await node.pull(first.next, wait_s=5.0)
        assert lost.reported == ("r", "s") and lost.pieces == ()
        again = await node.pull(first.next)
        assert again.reported == ("r", "s")
        assert (await node.pull(again.next)).reported == ()
        node.runs.report("r", Report(step=2, values={"loss": 1.0}))
        assert (await node.pull(again.next, wait_s=5.0)).reported == ("r",)

    on_a_node(tmp_path, check)
