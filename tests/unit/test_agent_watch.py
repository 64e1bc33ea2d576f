"""What the agent does when memory runs short, and what it knows of a run's commits."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from racimo.agent import watch as watch_module
from racimo.agent.entry import Entry
from racimo.agent.processes import ProcessRecord
from racimo.agent.protocol import Report, WorkerOrder
from racimo.agent.pulse import Pulse
from racimo.agent.runs import Runs, newest_commit
from racimo.agent.watch import Watch
from racimo.spec.home import Home

GIB = 2**30


class FewWorkers:
    def __init__(self, *entries: Entry) -> None:
        self.live = list(entries)
        self.started = Pulse()


def entry(index: int, limit: int | None = None) -> Entry:
    order = WorkerOrder(worker=f"r/1/{index}", kind="train", rank=index, memory_bytes=limit)
    return Entry(order=order, directory=Path("/nowhere"), record=ProcessRecord(pid=1000 + index, start_ticks=1))


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of workers in the order in which the watch ends them; worker N holds N + 1 GiB."""
    names: list[str] = []
    monkeypatch.setattr(watch_module, "signal_worker", lambda entry, number: names.append(entry.name))
    monkeypatch.setattr(watch_module, "tree_private_bytes", lambda pid: (pid - 999) * GIB)
    return names


def check(monkeypatch: pytest.MonkeyPatch, free: int, *entries: Entry) -> None:
    monkeypatch.setattr(watch_module.processes, "memory_bytes", lambda: (free, 100 * GIB))

    async def once() -> None:
        files: Any = None
        spool: Any = None
        workers: Any = FewWorkers(*entries)
        home = Home(Path("/nowhere"))
        watch = Watch(home, "host", workers, Runs(home), spool, files)
        watch._check_limits(workers.live)
        watch._check_node_memory(workers.live)
        await watch.close()

    asyncio.run(once())


def test_the_largest_worker_goes_when_the_node_runs_out(monkeypatch: pytest.MonkeyPatch, killed: list[str]) -> None:
    entries = [entry(index) for index in range(3)]
    check(monkeypatch, 2 * GIB, *entries)
    assert killed == ["r/1/2"]
    doom = entries[2].doom
    assert doom is not None and doom.code == "out-of-memory" and doom.rank == 2
    assert "2.1 GB of 107 GB" in doom.message and "3.2 GB" in doom.message


def test_one_is_ended_at_a_time(monkeypatch: pytest.MonkeyPatch, killed: list[str]) -> None:
    entries = [entry(index) for index in range(3)]
    check(monkeypatch, 2 * GIB, *entries)
    check(monkeypatch, 2 * GIB, *entries)
    assert killed == ["r/1/2"]


def test_with_memory_left_nobody_is_ended(monkeypatch: pytest.MonkeyPatch, killed: list[str]) -> None:
    check(monkeypatch, 4 * GIB, entry(0))
    assert killed == []


def test_a_worker_beyond_its_own_limit_goes_whatever_the_node_has(
    monkeypatch: pytest.MonkeyPatch, killed: list[str]
) -> None:
    check(monkeypatch, 90 * GIB, entry(0, limit=2 * GIB), entry(1, limit=1 * GIB))
    assert killed == ["r/1/1"]


def test_the_newest_commit_of_any_worker_counts_and_torn_lines_do_not(tmp_path: Path) -> None:
    for name, content in (("1/0", '{"step":7}\n{"step":8}\n'), ("1/1", '{"step":9}\n{"st'), ("2/0", "")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "steps.jsonl").write_text(content)
    assert newest_commit(tmp_path) == 9
    assert newest_commit(tmp_path / "none") == 0


def test_reports_survive_a_restart_and_still_count_once(tmp_path: Path) -> None:
    home = Home(tmp_path)
    Runs(home).report("r", Report(step=1, values={"loss": 2.0}))
    again = Runs(home)
    again.report("r", Report(step=1, values={"loss": 3.0}))
    again.report("r", Report(step=2, values={"loss": 1.0}))
    assert [report.values["loss"] for report in again.read_reports("r", 0, 10).reports] == [2.0, 1.0]
    assert again.read_reports("r", 1, 10).next == 2
