"""A full disk, a capped log, environments: what a machine has too little of, or has to build first."""

import os
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import RealAgent

from racimo.agent.protocol import ForgetRun, LogChunk, ReadLog

pytestmark = pytest.mark.e2e
DISK_BYTES = 160 * 2**20


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealAgent]:
    real = RealAgent(tmp_path_factory.mktemp("agent") / "home")
    yield real
    real.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root and the right to mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_named_its_exit_recorded_and_nothing_more_is_started(small_disk: Path) -> None:
    agent = RealAgent(small_disk / "home")
    try:
        agent.run("fill/1/0", "sh", "-c", "cat /dev/zero > $RACIMO_OUTPUT_DIR/fill")
        exit = agent.exit("fill/1/0")
        assert exit.outcome == "failed" and exit.failure is not None and exit.failure.code == "disk-full"
        assert (agent.home.worker_dir("fill/1/0") / "exit.json").exists()
        agent.run("more/1/0", "true")
        refused = agent.exit("more/1/0").failure
        assert refused is not None and refused.code == "disk-full" and "needs 67.1 MB" in refused.message
        (agent.home.output_dir("fill") / "fill").write_bytes(bytes(80 * 2**20))
        agent.train("log/1/0", "while True: print('x' * 100_000)")
        failure = agent.exit("log/1/0", timeout_s=60).failure
        assert failure is not None and failure.code == "disk-full"
        (agent.home.output_dir("fill") / "fill").unlink()
        agent.request(ForgetRun(run="log"))
        agent.run("again/1/0", "true")
        assert agent.exit("again/1/0").code == 0
    finally:
        agent.close()


def test_a_follower_gets_lines_as_they_come_and_the_end(agent: RealAgent) -> None:
    agent.run("follow/1/0", "sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.1; done")
    chunks: list[LogChunk] = []
    while not chunks or not chunks[-1].ended:
        offset = chunks[-1].offset + len(chunks[-1].content) if chunks else 0
        chunk = agent.request(ReadLog(worker="follow/1/0", offset=offset, wait_s=10))
        assert isinstance(chunk, LogChunk)
        chunks.append(chunk)
    assert b"".join(chunk.content for chunk in chunks) == b"1\n2\n3\n"
    assert len([chunk for chunk in chunks if chunk.content]) == 3


def make_wheel(folder: Path) -> Path:
    """A wheel with one module, made by hand: nothing has to be downloaded or built."""
    path = folder / "tinything-1.0-py3-none-any.whl"
    info = "tinything-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tinything.py", "VALUE = 41\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinything\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_an_environment_is_built_once_and_shares_the_clusters_torch(agent: RealAgent, tmp_path: Path) -> None:
    requirements = f"{make_wheel(tmp_path)}\n"
    for number in range(2):
        worker = f"env{number}/1/0"
        script = "import sys, msgspec, tinything; print(tinything.VALUE, sys.prefix)"
        agent.run(worker, "python", "-c", script, requirements=requirements)
        assert agent.exit(worker, timeout_s=60).code == 0, agent.log(worker, "err")
        assert agent.log(worker).startswith("41 " + str(agent.home.node_dir / "envs"))
    built = [path for path in (agent.home.node_dir / "envs").iterdir() if path.is_dir()]
    assert len(built) == 1
    agent.train("envtrain/1/0", "import tinything, torch\nprint(tinything.VALUE)", requirements=requirements)
    assert agent.exit("envtrain/1/0", timeout_s=60).code == 0, agent.log("envtrain/1/0", "err")


def test_an_environment_that_cannot_be_built_says_why(agent: RealAgent) -> None:
    agent.run("noenv/1/0", "true", requirements="/no/such/wheel-1.0-py3-none-any.whl\n")
    failure = agent.exit("noenv/1/0", timeout_s=60).failure
    assert failure is not None and failure.code == "environment-failed"
    assert "wheel-1.0" in failure.message and "wheel-1.0" in failure.traceback
