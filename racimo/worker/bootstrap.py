"""The first code of a training worker after its fork: prepares the process, runs the user's file, records the end."""

import ast
import atexit
import contextlib
import ctypes
import errno
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import io
import os
import random
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from racimo.agent.exits import write_exit
from racimo.agent.launch import Launch
from racimo.agent.processes import set_child_subreaper
from racimo.spec.errors import RacimoError
from racimo.state.nouns import Exit, Failure
from racimo.worker.context import WorkerLeaving, load_context
from racimo.worker.preflight import check_script
from racimo.worker.user_errors import failure_from

STACKS_FILE = "stacks.log"
FLUSH_FAILED_CODE = 120
"""Python's own exit code when standard output cannot be flushed at the end."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_ALLOCATION_BYTES = 1 << 30


def main(launch: Launch) -> NoReturn:
    """Runs the worker to its end; never returns. The exit is on disk before the process ends."""
    started_s = time.monotonic()
    _prepare(launch)
    exit = _run(launch, lambda: _execute(launch))
    if exit.outcome == "finished":
        # As at the end of any Python program. Where it failed, peers are waiting for our death: leave at once.
        with contextlib.suppress(SystemExit):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
    exit = _flush(exit, launch)
    exit = Exit(
        outcome=exit.outcome,
        code=exit.code,
        signal=exit.signal,
        failure=exit.failure,
        held_s=time.monotonic() - started_s,
    )
    with contextlib.suppress(OSError):
        # A disk that takes nothing any more: the zygote sees the code and tells the agent by message.
        write_exit(Path(launch.directory), exit, Path(launch.ballast))
    os._exit((exit.code or 0) & 0xFF)


def _prepare(launch: Launch) -> None:
    gc.enable()
    set_child_subreaper()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    stacks = os.open(Path(launch.directory) / STACKS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    # glibc maps and unmaps every large tensor anew by default: page faults cost a third of a short step.
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_ALLOCATION_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _LARGE_ALLOCATION_BYTES)
    _seed_everything(launch.seed, launch.threads)


def _seed_everything(seed: int, threads: int) -> None:
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
        torch.manual_seed(seed)


def _run(launch: Launch, execute: Callable[[], None]) -> Exit:
    """How the user's code ended, its traceback printed as Python would."""
    try:
        execute()
    except WorkerLeaving as leaving:
        return Exit(outcome=leaving.outcome, code=0)
    except SystemExit as leaving:
        return _exit_of_system_exit(leaving)
    except _Unfit as unfit:
        print(f"racimo: {unfit.failure.message}", file=sys.stderr)
        return Exit(outcome="failed", code=1, failure=unfit.failure)
    except BaseException as error:  # noqa: BLE001 - whatever user code raises ends here, as in any Python program
        failure = failure_from(error, launch.cwd, launch.rank, launch.worker)
        print(failure.traceback, end="", file=sys.stderr)
        return Exit(outcome="failed", code=130 if isinstance(error, KeyboardInterrupt) else 1, failure=failure)
    return Exit(outcome="finished", code=0)


class _Unfit(Exception):
    """Found before any user code ran."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def _exit_of_system_exit(leaving: SystemExit) -> Exit:
    code = leaving.code
    if code is None or isinstance(code, int):
        number = (code or 0) & 0xFF
        return Exit(outcome="finished" if number == 0 else "failed", code=number)
    print(code, file=sys.stderr)
    return Exit(outcome="failed", code=1)


def _execute(launch: Launch) -> None:
    path = Path(launch.cwd) / launch.train_file
    sys.argv = [launch.train_file, *launch.args]
    sys.path[0] = os.fspath(path.parent)
    for folder in reversed(launch.environment.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(1, folder)
    importlib.invalidate_caches()
    failure = check_script(path, launch.train_file, launch.host)
    if failure is not None:
        fields = {name: getattr(failure, name) for name in ("code", "message", "hint")}
        raise _Unfit(Failure(**fields, rank=launch.rank, worker=launch.worker))
    if launch.kind == "tune":
        _serve_trials(path, launch)
    elif launch.train_function:
        _call(_function(path, launch.train_function), launch.config)
    else:
        _run_as_main(path)


def _run_as_main(path: Path) -> None:
    """As `python FILE` does: a fresh `__main__`, so that pickling and `if __name__ == "__main__"` work."""
    module = types.ModuleType("__main__")
    module.__file__ = os.fspath(path)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    code = compile(ast.parse(path.read_bytes(), filename=os.fspath(path)), os.fspath(path), "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _serve_trials(path: Path, launch: Launch) -> None:
    from racimo.worker.tune.fresh import NEXT_CODE, code_of, serve_one_by_one  # with torch, which commands do without
    from racimo.worker.tune.lane import serve

    context = load_context()
    assert context is not None

    def serve_all(only_one_trial: bool = False) -> None:
        function = _function(path, launch.train_function)
        serve(lambda config: _call(function, config), launch, context, only_one_trial)

    def serve_one() -> int:
        """In a process of its own, whose end is its worker's if it is not the trial's alone."""
        exit, code = _run(launch, lambda: serve_all(only_one_trial=True)), NEXT_CODE
        if exit.outcome in ("paused", "released"):
            code = code_of(exit.outcome)
        elif exit.outcome != "finished":
            with contextlib.suppress(OSError):
                write_exit(Path(launch.directory), exit, Path(launch.ballast))
            code = exit.code or 1
        _flush(exit, launch)
        return code

    if launch.fresh:
        serve_one_by_one(serve_one)
    serve_all()


def _function(path: Path, name: str) -> Any:
    """Imports the file as a module; its function of that name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        found = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        message = f"{path.name} has no function {name}; it has {', '.join(found) or 'none'}"
        raise RacimoError("function-missing", message)
    return function


def _call(function: Any, config: dict[str, Any]) -> Any:
    """With `config`, unless it takes no argument."""
    return function() if _takes_nothing(function) else function(config)


def _takes_nothing(function: Any) -> bool:
    try:
        return not inspect.signature(function).parameters
    except ValueError:
        return False  # a builtin without a signature


def _flush(exit: Exit, launch: Launch) -> Exit:
    """`os._exit` flushes nothing: do what the interpreter's own end would, for every file that is still open."""
    files = [found for found in gc.get_objects() if isinstance(found, io.TextIOWrapper | io.BufferedWriter)]
    for file in (sys.stdout, sys.stderr, *files):
        try:
            if not file.closed:
                file.flush()
        except ValueError:
            continue  # detached or closed meanwhile
        except OSError as error:
            if exit.outcome == "finished":
                code = "disk-full" if error.errno == errno.ENOSPC else "worker-exited"
                message = f"what it wrote last was lost: {error}"
                failure = Failure(code=code, message=message, rank=launch.rank, worker=launch.worker)
                exit = Exit(outcome="failed", code=FLUSH_FAILED_CODE, failure=failure)
    return exit
