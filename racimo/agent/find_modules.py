"""Whether an environment's interpreter can find modules, without importing any."""

import asyncio
import functools
import importlib.util
import json
import signal
from collections.abc import Iterable

from racimo.agent.environments import Environment
from racimo.agent.processes import set_parent_death_signal
from racimo.spec.errors import RacimoError

TIMEOUT_S = 20.0

_SCRIPT = """
import importlib.util, json, sys
del sys.path[0]
def found(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        return True
print(json.dumps([name for name in sys.argv[1:] if not found(name)]))
"""


async def missing_modules(environment: Environment, modules: Iterable[str]) -> tuple[str, ...]:
    """Those of these top-level modules that are not there. `RacimoError` environment-failed if it cannot be asked."""
    names = [name for name in dict.fromkeys(modules) if name.isidentifier()]
    if not environment.hash:
        return await asyncio.to_thread(_missing_here, names)
    process = await asyncio.create_subprocess_exec(
        environment.python, "-c", _SCRIPT, *names,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, cwd="/",
        preexec_fn=functools.partial(set_parent_death_signal, signal.SIGKILL),
    )  # fmt: skip
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        output = b""
    try:
        return tuple(json.loads(output))
    except ValueError:
        raise RacimoError(
            "environment-failed", f"{environment.python} does not say which modules it has (exit {process.returncode})"
        ) from None


def _missing_here(names: list[str]) -> tuple[str, ...]:
    """The cluster's own interpreter is the agent's."""
    importlib.invalidate_caches()
    return tuple(name for name in names if not _is_here(name))


def _is_here(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        return True  # already imported, without a spec of its own
