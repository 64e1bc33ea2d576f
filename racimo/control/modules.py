"""Whether every node that gets workers of a training run has the modules that its script imports, before any starts."""

import ast
import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import PurePosixPath

import msgspec

from racimo.agent.protocol import FileEntry, FindModules, ModulesReply, ReplyBody, RequestBody
from racimo.control.snapshots import SnapshotStore
from racimo.spec.errors import RacimoError
from racimo.spec.run import RunSpec
from racimo.state.nouns import Node, Run
from racimo.worker.preflight import early_imports

MAX_SCRIPT_BYTES = 10 * 10**6
MAX_NAMED_MODULES = 10
MAX_REMEMBERED = 1_024

log = logging.getLogger("racimo.control.modules")

Request = Callable[[str, RequestBody], Awaitable[ReplyBody]]
_Place = tuple[str, int, str]
"""Run, attempt, node."""


class Imports(msgspec.Struct, frozen=True):
    """What a script is certain to import: the line of each top-level module."""

    script: str
    lines: dict[str, int]


class ModuleCheck:
    """Asks each node once per attempt. `node_of`: a node that can be asked now, None for others."""

    def __init__(self, snapshots: SnapshotStore, request: Request, node_of: Callable[[str], Node | None]) -> None:
        self._snapshots, self._request, self._node_of = snapshots, request, node_of
        self._asked: dict[_Place, asyncio.Task[None]] = {}

    async def require(self, run: Run) -> None:
        """`RacimoError` module-missing (with host, module, line and cure) or environment-failed, if any node of the
        attempt cannot run the script. One node alone finds that out as its first worker starts, without a question."""
        nodes = sorted({worker.node for worker in run.live_workers})
        if run.spec.kind == "command" or (len(nodes) < 2 and run.generation is None):
            return
        imports = await asyncio.to_thread(self._imports, run.spec)
        if not imports.lines:
            return
        tasks = [self._ask(run, node, imports) for name in nodes if (node := self._node_of(name)) is not None]
        await asyncio.wait(tasks)
        for task in tasks:
            task.result()

    def _ask(self, run: Run, node: Node, imports: Imports) -> asyncio.Task[None]:
        place = (run.id, run.attempt, node.id)
        if place not in self._asked:
            while len(self._asked) >= MAX_REMEMBERED:
                del self._asked[next(iter(self._asked))]
            look = self._look(node, run.spec, imports)
            self._asked[place] = asyncio.create_task(look, name=f"modules on {node.id}")
        return self._asked[place]

    async def _look(self, node: Node, spec: RunSpec, imports: Imports) -> None:
        question = FindModules(modules=tuple(imports.lines), requirements=spec.requirements)
        try:
            reply = await self._request(node.id, question)
        except RacimoError as error:
            if error.code == "environment-failed":
                raise
            log.warning("node %s does not say which modules it has: %s", node.id, error.message)
            return  # it cannot start anything now either; its worker looks for itself
        assert isinstance(reply, ModulesReply)
        if reply.missing:
            raise missing_error(node, imports, reply.missing)

    def _imports(self, spec: RunSpec) -> Imports:
        files = self._snapshots.manifest(spec.snapshot)
        script = next((file for file in files if file.path == spec.train_file), None)
        if script is None or script.size_bytes > MAX_SCRIPT_BYTES or "PYTHONPATH" in spec.variables:
            return Imports(spec.train_file, {})
        own = own_modules(files, spec.train_file)
        try:
            tree = ast.parse(self._snapshots.read_blob(script.sha256))
        except (SyntaxError, ValueError, RecursionError):
            return Imports(spec.train_file, {})  # Python itself says it better, in the worker
        lines = early_imports(tree, own.__contains__)
        return Imports(spec.train_file, {name: line for name, line in lines.items() if name not in own})


def own_modules(files: tuple[FileEntry, ...], script: str) -> set[str]:
    """Top-level modules that come with the run: what lies beside its script."""
    folder = PurePosixPath(script).parent
    paths = [PurePosixPath(file.path) for file in files]
    return {path.relative_to(folder).parts[0].partition(".")[0] for path in paths if path.is_relative_to(folder)}


def missing_error(node: Node, imports: Imports, missing: tuple[str, ...]) -> RacimoError:
    places = ", ".join(f"{name!r} ({imports.script}:{imports.lines[name]})" for name in missing[:MAX_NAMED_MODULES])
    noun = "module" if len(missing) == 1 else f"{len(missing)} modules"
    packages = " ".join(missing[:MAX_NAMED_MODULES])
    return RacimoError(
        "module-missing",
        f"{node.host} ({node.id}) lacks the {noun} {places}: nothing was started on any host",
        f"put {packages} into a requirements.txt and pass --env requirements.txt, or install it on {node.host}",
    )
