"""What a worker is to be, from the state: the order for its agent, and the name of a new run."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from racimo.agent.protocol import FileEntry, SliceOrder, StateAt, WorkerOrder
from racimo.control.shipping import peer_of
from racimo.spec.quantity import parse_duration_s
from racimo.spec.run import RunSpec
from racimo.state.nouns import Node, Run, Worker, worker_id
from racimo.state.study import Study
from racimo.state.trials import Grant

MAX_NAME_CHARS = 40
INTERPRETER = re.compile(r"(python|pypy)[0-9.]*|(ba|da|z|k)?sh|node|ruby|perl|Rscript|julia")
INLINE_OPTIONS = frozenset({"-c", "-e", "-"})
"""After these stands the program itself, or it comes from stdin: there is no script to be named after."""
FIRST_PORT, NUM_PORTS = 20_000, 12_000
"""Below the kernel's range for outgoing connections, as the agent's own choice on one machine."""
VALUED_OPTIONS = {"python": ("-W", "-X"), "pypy": ("-W", "-X"), "sh": ("-o", "+o")}


def run_name(spec: RunSpec) -> str:
    """What a run is called before its number: its name, else the script's stem or the command's basename. Of an
    interpreter with a script (`python slow.py`) the script counts."""
    if spec.name:
        return spec.name
    asked = _command_name(spec.command) if spec.command else PurePosixPath(spec.train_file).stem
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
    run: Run,
    worker: Worker,
    nodes: Mapping[str, Node],
    files: tuple[FileEntry, ...] = (),
    secrets: dict[str, str] | None = None,
) -> WorkerOrder:
    """The order for one worker of the run's present attempt; the same whenever it is asked for."""
    spec = run.spec
    first = _first_workers(run)
    alone = spec.kind == "tune"
    """Its function sees one worker: each of the run's runs trials of its own."""
    return WorkerOrder(
        worker=worker_id(run.id, worker.attempt, worker.index),
        kind=spec.kind,
        command=spec.command,
        train_file=spec.train_file,
        train_function=spec.train_function,
        args=spec.args,
        config=spec.config,
        files=files,
        requirements=spec.requirements,
        variables=spec.variables,
        secrets=secrets or {},
        devices=worker.devices,
        shares=spec.shares,
        threads=spec.threads,
        memory_bytes=spec.memory_bytes,
        rank=0 if alone else worker.rank,
        # A worker that comes later is outside of torchrun's count; the generation tells it its place.
        world_size=1 if alone else max(len(first), worker.rank + 1),
        restart_count=run.attempt - 1,
        max_restarts=spec.retries,
        rendezvous_key=f"{run.id}/{worker.attempt}",
        least=1 if alone else run.least,
        most=1 if alone else run.most,
        seed=spec.seed,
        hang_after_s=parse_duration_s(spec.hang_after),
        checkpoint=spec.checkpoint,
        paid_s=worker.paid_s,
        fresh=spec.study is not None and spec.study.fresh,
        **({} if alone else _place(run, worker, first, nodes)),
    )


def slice_order(run: Run, study: Study, grant: Grant, nodes: Mapping[str, Node]) -> SliceOrder:
    """What the worker of a grant is told; the same whenever it is asked for while the slice runs."""
    trial = study.trials[grant.trial]
    return SliceOrder(
        grant=grant,
        values=trial.values,
        rounds=trial.rounds,
        step=trial.step,
        saved=trial.saved,
        states=tuple(_states(study, grant, nodes)),
        objectives=tuple(objective.metric for objective in study.objectives),
        metric_within_s=study.terms.metric_within_s,
        leave_within_s=parse_duration_s(run.spec.stop_grace),
    )


def _states(study: Study, grant: Grant, nodes: Mapping[str, Node]) -> Iterator[StateAt]:
    """Where a state may lie to go on from: where the trial ran last, where one was surely saved, its parent's."""
    trial = study.trials[grant.trial]
    parent = study.trials[grant.state_of] if grant.state_of is not None else None
    wanted = [(trial.number, trial.ran_on), (trial.number, trial.saved_on)]
    wanted += [(parent.number, parent.saved_on)] if parent is not None else []
    for number, name in dict.fromkeys(wanted):
        if name:
            node = nodes.get(name)
            yield StateAt(trial=number, node=name, peer=peer_of(node) if node is not None else None)


def master_port(key: str) -> int:
    """The port of one rendezvous; agents start looking for a free one at the same place."""
    return FIRST_PORT + int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % NUM_PORTS


def _first_workers(run: Run) -> list[Worker]:
    """Those that the attempt began with, in order of rank."""
    first_at_s = min(other.started_at_s for other in run.workers.values())
    return sorted((w for w in run.workers.values() if w.started_at_s == first_at_s), key=lambda w: w.rank)


def _place(run: Run, worker: Worker, first: list[Worker], nodes: Mapping[str, Node]) -> dict[str, Any]:
    """torchrun's local and group ranks, and where rank 0 is; nothing while all are on one node."""
    groups = list(dict.fromkeys([*(other.node for other in first), worker.node]))
    if len(groups) == 1:
        return {}
    beside = [w for w in first if w.node == worker.node]
    before = [w for w in run.workers.values() if w.node == worker.node and w.rank < worker.rank]
    master = nodes.get(first[0].node)
    return {
        "master_address": master.address if master is not None else "",
        "master_port": master_port(f"{run.id}/{worker.attempt}"),
        "local_rank": len(before),
        "local_world_size": max(len(beside), len(before) + 1),
        "group_rank": groups.index(worker.node),
        "group_world_size": len(groups),
    }
