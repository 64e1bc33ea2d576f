"""Clusters for the tests; they are taken down without a trace."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_cluster import LiveCluster, wait_until


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    live = LiveCluster(tmp_path_factory.mktemp("cluster") / "home", slots=4)
    live.up()
    yield live
    done = live.cli("down")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not live.pids(), f"no process left: {live.pids()}", 15)


@pytest.fixture
def fresh_cluster(tmp_path: Path) -> Iterator[LiveCluster]:
    live = LiveCluster(tmp_path / "home", slots=4)
    yield live
    if live.home.root.exists():
        live.cli("down")
        wait_until(lambda: not live.pids(), f"no process left: {live.pids()}", 15)
