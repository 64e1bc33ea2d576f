"""Process records, the watch over the supervisor, and what is ended at a shutdown."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from racimo.act import guardian, leftovers
from racimo.spec.home import Home

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def sleeper() -> subprocess.Popen[bytes]:  # type: ignore[misc]
    process = subprocess.Popen(SLEEP, start_new_session=True)
    yield process  # type: ignore[misc]
    process.kill()
    process.wait()


def test_the_light_paths_are_those_of_the_home(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert Path(guardian.record_path(tmp_path, "x")) == home.processes_dir / "x.json"
    assert tmp_path / guardian.LOGS_DIR == home.service_logs_dir
    assert tmp_path / guardian.LOCK_FILE == home.supervisor_lock


def test_a_record_means_one_process_and_no_other_of_that_pid(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    record = guardian.write_record(tmp_path, "agent", sleeper.pid)
    live = guardian.read_live(tmp_path, "agent")
    assert live is not None and live.pid == sleeper.pid
    path = Path(guardian.record_path(tmp_path, "agent"))
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text(json.dumps({"pid": sleeper.pid, "start_ticks": record.start_ticks - 1, "role": "agent"}))
    assert guardian.read_live(tmp_path, "agent") is None


def test_a_zombie_is_dead(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    record = guardian.write_record(tmp_path, "agent", sleeper.pid)
    pidfd = guardian.open_pidfd(record)
    assert pidfd is not None
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # dead and not yet reaped
    assert guardian.start_ticks(sleeper.pid) is None and guardian.read_live(tmp_path, "agent") is None
    assert guardian.open_pidfd(record) is None
    os.close(pidfd)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x", "start_ticks": 1}', '{"pid": 1}', "null"])
def test_a_damaged_record_is_nobody(tmp_path: Path, content: str) -> None:
    path = Path(guardian.record_path(tmp_path, "agent"))
    path.parent.mkdir()
    path.write_text(content)
    assert guardian.read_live(tmp_path, "agent") is None


def test_restarts_come_at_once_then_slower_up_to_a_bound() -> None:
    delays = [0.0]
    for _ in range(8):
        delays.append(guardian.next_delay_s(delays[-1]))
    assert delays == [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_services_get_nothing_of_the_shell_that_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMP_NUM_THREADS", "AWS_SECRET_ACCESS_KEY", "RACIMO_WORKER", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    environment = guardian.clean_environment()
    assert environment["LC_ALL"] == "C.UTF-8" and "PATH" in environment
    assert not {"RANK", "OMP_NUM_THREADS", "AWS_SECRET_ACCESS_KEY", "RACIMO_WORKER", "RAY_ADDRESS"} & set(environment)


def test_a_dead_supervisor_is_replaced_and_the_new_one_watched(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        started: list[subprocess.Popen[bytes]] = []
        news: asyncio.Queue[int] = asyncio.Queue()

        def start(root: object) -> int:
            process = subprocess.Popen(SLEEP)
            started.append(process)
            guardian.write_record(tmp_path, "supervisor", process.pid)
            news.put_nowait(process.pid)
            return process.pid

        monkeypatch.setattr(guardian, "start_supervisor", start)
        monkeypatch.setenv(guardian.SUPERVISED_VARIABLE, "1")
        guardian.write_record(tmp_path, "supervisor", sleeper.pid)
        said: list[str] = []
        watcher = guardian.watch(tmp_path, asyncio.get_running_loop(), said.append)
        assert watcher is not None and guardian.SUPERVISED_VARIABLE not in os.environ
        sleeper.kill()
        sleeper.wait()
        async with asyncio.timeout(10):
            first = await news.get()
            os.kill(first, signal.SIGKILL)
            second = await news.get()
        assert len(said) == 2 and str(second) in said[1]
        watcher.close()
        for process in started:
            process.kill()
            process.wait()
        await asyncio.sleep(0.01)
        assert news.empty(), "a closed watch starts nothing"

    asyncio.run(check())


def test_what_was_not_started_by_a_supervisor_watches_none(tmp_path: Path) -> None:
    async def check() -> None:
        assert guardian.watch(tmp_path, asyncio.get_running_loop()) is None

    asyncio.run(check())


def test_leftovers_are_found_by_record_group_and_session_and_nothing_else(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    """ray#31451, #32725: processes and device memory stay held."""
    script = "sleep 60 & echo $!; exec sleep 62"
    worker = subprocess.Popen(["sh", "-c", script], start_new_session=True, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    child = int(worker.stdout.readline())
    orphaned = subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!"], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    assert orphaned.stdout is not None
    orphan = int(orphaned.stdout.readline())
    ticks = {pid: guardian.start_ticks(pid) for pid in (worker.pid, orphaned.pid)}
    for index, pid in enumerate((worker.pid, orphaned.pid)):
        folder = tmp_path / "node" / "workers" / "run-1" / "1" / str(index)
        folder.mkdir(parents=True)
        (folder / "pid.json").write_text(
            json.dumps({"pid": pid, "start_ticks": ticks[pid] or guardian.start_ticks(orphan)})
        )
    orphaned.wait()  # the leader is gone, its group is not
    found = leftovers.find_all(str(tmp_path))
    assert {worker.pid, child, orphan} <= found
    others = {os.getpid(), os.getppid(), sleeper.pid}
    assert os.getpid() not in found and os.getppid() not in found
    assert found - others <= {worker.pid, child, orphan} | _children_of_this_process()
    for pid in (child, worker.pid, orphan):
        os.kill(pid, signal.SIGKILL)
    worker.wait()


def _children_of_this_process() -> set[int]:
    me = os.getpid()
    return {int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()}


def test_a_home_that_is_a_file_has_no_processes(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert guardian.read_live(tmp_path / "file", "supervisor") is None
