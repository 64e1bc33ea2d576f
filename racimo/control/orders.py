"""What a worker is to be, from the state: the order for its agent, and the name of a new run."""

import re
from pathlib import PurePosixPath

from racimo.agent.protocol import FileEntry, WorkerOrder
from racimo.spec.quantity import parse_duration_s
from racimo.spec.run import RunSpec
from racimo.state.nouns import Run, Worker, worker_id

MAX_NAME_CHARS = 40
INTERPRETER = re.compile(r"(python|pypy)[0-9.]*|(ba|da|z|k)?sh|node|ruby|perl|Rscript|julia")
INLINE_OPTIONS = frozenset({"-c", "-e", "-"})
"""After these stands the program itself, or it comes from stdin: there is no script to be named after."""
VALUED_OPTIONS = {"python": ("-W", "-X"), "pypy": ("-W", "-X"), "sh": ("-o", "+o")}


def run_name(spec: RunSpec) -> str:
    """What a run is called before its number: its name, else the script's stem or the command's basename. Of an
    interpreter with a script (`python slow.py`) the script counts."""
    if spec.name:
        return spec.name
    asked = PurePosixPath(spec.train_file).stem if spec.train else _command_name(spec.command)
    name = re.sub(r"[^a-z0-9]+", "-", asked.lower()).strip("-")[:MAX_NAME_CHARS].rstrip("-")
    return name or "run"


def _command_name(command: tuple[str, ...]) -> str:
    program = PurePosixPath(command[0]).name
    if not INTERPRETER.fullmatch(program):
        return program
    valued = next((options for kind, options in VALUED_OPTIONS.items() if kind in program), ())
    words = iter(command[1:])
    for word in words:
        if word in INLINE_OPTIONS:
            break
        if word == "-m" and "py" in program:
            return next(words, program)
        if word in valued:
            next(words, "")
        elif not word.startswith(("-", "+")):
            return PurePosixPath(word).stem or program
    return program


def worker_order(
    run: Run, worker: Worker, files: tuple[FileEntry, ...] = (), secrets: dict[str, str] | None = None
) -> WorkerOrder:
    """The order for one worker of the run's present attempt; the same whenever it is asked for."""
    spec = run.spec
    first_at_s = min(other.started_at_s for other in run.workers.values())
    world_size = sum(other.started_at_s == first_at_s for other in run.workers.values())
    return WorkerOrder(
        worker=worker_id(run.id, worker.attempt, worker.index),
        kind=spec.kind,
        command=spec.command,
        train_file=spec.train_file if spec.train else "",
        train_function=spec.train_function if spec.train else "",
        args=spec.args,
        config=spec.config,
        files=files,
        requirements=spec.requirements,
        variables=spec.variables,
        secrets=secrets or {},
        devices=worker.devices,
        threads=spec.threads,
        memory_bytes=spec.memory_bytes,
        rank=worker.rank,
        # A worker that comes later is outside of torchrun's count; the generation tells it its place.
        world_size=max(world_size, worker.rank + 1),
        restart_count=run.attempt - 1,
        max_restarts=spec.retries,
        rendezvous_key=f"{run.id}/{worker.attempt}",
        least=run.least,
        most=run.most,
        seed=spec.seed,
        hang_after_s=parse_duration_s(spec.hang_after),
        checkpoint=spec.checkpoint,
    )
