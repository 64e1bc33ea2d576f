"""A zygote of another version is left to its workers, and a new one takes its place at once."""

import asyncio
import sys
import time
from pathlib import Path

import pytest

from racimo.agent.launch import Launch, Reaped, ZygoteWelcome
from racimo.agent.zygote_keeper import ZygoteKeeper
from racimo.spec.home import Home

pytestmark = pytest.mark.e2e


def launch(home: Home, worker: str, *command: str) -> Launch:
    directory = home.worker_dir(worker)
    directory.mkdir(parents=True)
    return Launch(
        worker=worker,
        directory=str(directory),
        cwd=str(home.root),
        environment={"PATH": "/usr/bin:/bin"},
        kind="command",
        command=command,
        ballast=str(home.node_dir / "ballast"),
    )


def test_a_zygote_of_another_version_keeps_its_workers_and_another_takes_new_ones(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for folder in (home.node_dir, home.processes_dir):
        folder.mkdir()
    reaped: list[Reaped] = []
    lost: list[frozenset[str]] = []

    class Upgraded(ZygoteKeeper):
        def _fits(self, welcome: ZygoteWelcome) -> bool:
            return welcome.pid != old_pid

    async def go() -> int:
        nonlocal old_pid
        first = ZygoteKeeper(home, "plain", "plain", sys.executable, reaped.append, lost.append)
        await first.launch(launch(home, "old/1/0", "sh", "-c", "sleep 1; exit 5"))
        record = first.record
        assert record is not None
        old_pid = record.pid
        await first.close(end_zygote=False)
        lost.clear()

        second = Upgraded(home, "plain", "plain", sys.executable, reaped.append, lost.append)
        begun_s = time.monotonic()
        await second.launch(launch(home, "new/1/0", "true"))
        assert time.monotonic() - begun_s < 0.9, "it does not wait for the old one's worker"
        while len(reaped) < 2:
            await asyncio.sleep(0.02)
        await second.close(end_zygote=True)
        return 0

    old_pid = 0
    asyncio.run(asyncio.wait_for(go(), 20))
    assert {told.worker: told.exit.code for told in reaped} == {"new/1/0": 0, "old/1/0": 5}
    assert lost == []
