"""Fixtures for tests with real training workers under a tiny agent."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed.checkpoint
from programs import everything
from tiny_cluster import TinyCluster

import racimo.worker.train.run  # noqa: F401 - imported before workers are forked

torch.set_num_threads(1)


@pytest.fixture
def home() -> Iterator[Path]:
    """A short path: sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="racimo-") as folder:
        yield Path(folder)


@pytest.fixture
def cluster(home: Path) -> Iterator[Callable[..., TinyCluster]]:
    """Makes clusters, by default of the program `everything`, and leaves no process behind."""
    made: list[TinyCluster] = []

    def make(config: dict[str, Any] | None = None, program: Any = everything, **kwargs: Any) -> TinyCluster:
        made.append(TinyCluster(home, program, config, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def undisturbed() -> str:
    """The hash of 20 steps of `everything` on one worker that nothing happened to."""
    with tempfile.TemporaryDirectory(prefix="racimo-") as folder:
        one = TinyCluster(Path(folder), everything)
        one.run(1)
        assert one.outcomes == ["finished"], one.story()
        (digest,) = one.hashes()
        one.close()
        return digest
