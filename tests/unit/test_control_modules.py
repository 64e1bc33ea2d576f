"""A module that is missing on one host is named with that host before anything starts anywhere."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from racimo.agent.protocol import FileEntry, FindModules, ModulesReply
from racimo.control.modules import ModuleCheck, own_modules
from racimo.control.snapshots import SnapshotStore
from racimo.spec.errors import RacimoError
from racimo.spec.run import RunSpec
from racimo.state.nouns import Generation, Node, Reason, Run, Worker

SCRIPT = b"""import json, numpy
import cheese.wheels
import beside
from package import thing
import only_seen_by_python
"""


class Nodes:
    """Answers by what each node lacks; `None` for one that does not answer."""

    def __init__(self, **lacking: set[str] | None) -> None:
        self.lacking = lacking
        self.questions: list[tuple[str, FindModules]] = []

    def node(self, name: str) -> Node | None:
        return Node(id=name, host=f"host-of-{name}", devices=()) if name in self.lacking else None

    async def ask(self, node: str, body: Any) -> Any:
        assert isinstance(body, FindModules)
        self.questions.append((node, body))
        lacking = self.lacking[node]
        if lacking is None:
            raise RacimoError("unreachable", "silence")
        return ModulesReply(missing=tuple(name for name in body.modules if name in lacking))


def check(tmp_path: Path, nodes: Nodes, scene: Callable[[ModuleCheck, RunSpec], Coroutine[Any, Any, None]]) -> None:
    snapshots = SnapshotStore(tmp_path / "blobs", tmp_path / "snapshots")
    name = hashlib.sha256(SCRIPT).hexdigest()
    draft = snapshots.draft(name)
    draft.write(SCRIPT)
    draft.finish()
    paths = ("src/train.py", "src/beside.py", "src/package/thing.py", "cheese.py")
    identity, _ = snapshots.put_manifest(tuple(FileEntry(path, 0o644, len(SCRIPT), name) for path in paths))
    spec = RunSpec(train="src/train.py", snapshot=identity)
    asyncio.run(scene(ModuleCheck(snapshots, nodes.ask, nodes.node), spec))


def run_on(spec: RunSpec, *nodes: str, **fields: Any) -> Run:
    workers = {
        index: Worker(index=index, attempt=1, node=node, devices=(0,), rank=index) for index, node in enumerate(nodes)
    }
    return Run(id="train-1", spec=spec, order=1, attempt=1, workers=workers, **fields)


def test_the_host_the_module_and_the_cure_are_named(tmp_path: Path) -> None:
    nodes = Nodes(n1=set(), n2={"cheese"})

    async def scene(modules: ModuleCheck, spec: RunSpec) -> None:
        for _ in range(2):  # each worker of the attempt is refused, and no node is asked twice
            with pytest.raises(RacimoError) as caught:
                await modules.require(run_on(spec, "n1", "n2", "n2"))
        assert caught.value.code == "module-missing"
        assert "host-of-n2 (n2) lacks the module 'cheese' (src/train.py:2)" in caught.value.message
        assert "--env requirements.txt" in caught.value.hint
        assert sorted(node for node, _ in nodes.questions) == ["n1", "n2"]

    check(tmp_path, nodes, scene)


def test_only_what_is_certain_to_be_imported_is_asked_for(tmp_path: Path) -> None:
    """What lies beside the script is its own and may change where modules are found: the rest is Python's to say."""
    nodes = Nodes(n1=set(), n2=set())

    async def scene(modules: ModuleCheck, spec: RunSpec) -> None:
        await modules.require(run_on(spec, "n1", "n2"))
        assert {question.modules for _, question in nodes.questions} == {("json", "numpy", "cheese")}

    check(tmp_path, nodes, scene)


def test_one_node_alone_is_not_asked_but_a_newcomers_is(tmp_path: Path) -> None:
    nodes = Nodes(n1=set(), n3={"numpy"})

    async def scene(modules: ModuleCheck, spec: RunSpec) -> None:
        await modules.require(run_on(spec, "n1", "n1"))
        assert not nodes.questions
        generation = Generation(number=1, members=(0,), reason=Reason(code="x", text="x"))
        with pytest.raises(RacimoError, match="host-of-n3"):
            await modules.require(run_on(spec, "n3", generation=generation))

    check(tmp_path, nodes, scene)


def test_a_node_that_does_not_answer_holds_nobody_up(tmp_path: Path) -> None:
    nodes = Nodes(n1=set(), n2=None)

    async def scene(modules: ModuleCheck, spec: RunSpec) -> None:
        await modules.require(run_on(spec, "n1", "n2", "gone"))

    check(tmp_path, nodes, scene)


def test_own_modules_are_files_folders_and_extensions_beside_the_script() -> None:
    files = [
        FileEntry(path, 0o644, 1, "0" * 64)
        for path in ("a/train.py", "a/one.py", "a/two/x.py", "a/three.cpython-311-x86_64-linux-gnu.so", "four.py")
    ]
    assert own_modules(tuple(files), "a/train.py") == {"train", "one", "two", "three"}
