"""Reading the exits of an attempt: who failed, who died, who is done. Facts only; what follows is decided elsewhere."""

from msgspec.structs import replace

from racimo.state.nouns import Failure, Run, Worker, worker_id

MAX_DEATHS_WITHOUT_PROGRESS = 5
_OURS = ("stop", "abort", "release")
_DIED = ("killed", "unknown")
_OF_ITS_NODE = frozenset({"disk-full", "environment-failed", "rendezvous-failed", "internal"})
"""Why a worker cannot be started on one node and may well be on another; a missing file is missing everywhere."""


def exact(run: Run) -> bool:
    """True once any worker of any attempt entered `run.steps`: deaths lose nothing, so they are no failures."""
    return run.elastic or run.micro_shards is not None


def culprits(run: Run) -> list[Worker]:
    """Workers whose end ends the attempt, the first to fail first; those that we ended are none."""
    found = [worker for worker in run.workers.values() if _at_fault(run, worker)]
    return sorted(found, key=lambda worker: worker.exited_at_s)


def _at_fault(run: Run, worker: Worker) -> bool:
    if worker.exit is None or worker.leaving in _OURS or _never_came(run, worker):
        return False
    if worker.exit.failure is not None and worker.exit.failure.code == "out-of-memory":
        return True
    return worker.exit.outcome == "failed" or (worker.exit.outcome in _DIED and not exact(run))


def _never_came(run: Run, worker: Worker) -> bool:
    """One that could not even be started (such as for want of disk) beside members that go on without it or, before
    the first generation, beside as many others as the run needs: what no node can start ends it at the latest then."""
    if not _not_started(worker):
        return False
    if run.generation is not None:
        return worker.index not in run.generation.members
    others = [other for other in run.workers.values() if not _not_started(other)]
    failure = worker.exit.failure if worker.exit is not None else None
    of_its_node = failure is not None and failure.code in _OF_ITS_NODE
    # Whoever is done without a generation knows nothing of the others: a part of the work would be missing.
    return of_its_node and len(others) >= run.least and not finished(run)


def _not_started(worker: Worker) -> bool:
    return worker.exit is not None and worker.exit.outcome == "failed" and worker.pid is None


def dead(run: Run) -> list[Worker]:
    """Workers that were killed, vanished or never came without our asking, in order of death."""
    found = [
        worker
        for worker in run.workers.values()
        if worker.exit is not None
        and worker.leaving not in _OURS
        and (worker.exit.outcome in _DIED or _never_came(run, worker))
    ]
    return sorted(found, key=lambda worker: worker.exited_at_s)


def not_started(run: Run) -> list[Worker]:
    """Those without whom the run goes on because their nodes could not start them."""
    return [worker for worker in run.workers.values() if _never_came(run, worker)]


def unhealed(run: Run) -> list[Worker]:
    """The dead that the present generation still counts as members; before the first generation, all dead."""
    members = None if run.generation is None else run.generation.members
    return [worker for worker in dead(run) if members is None or worker.index in members]


def finished(run: Run) -> list[Worker]:
    """Workers whose code came to its end."""
    return [
        w
        for w in run.workers.values()
        if w.exit is not None and w.exit.outcome == "finished" and w.leaving not in _OURS
    ]


def holds_state(run: Run, worker: Worker, at_s: float, settled_s: float) -> bool:
    """Whether a worker is taken to hold the run's newest step at `at_s`.

    Those with whom the attempt began do; others say so. Where nobody says it (workers of an earlier version) one counts
    once it has been a member for `settled_s`.
    """
    if run.generation is None or worker.index not in run.generation.members:
        return False
    began_s = min(other.started_at_s for other in run.workers.values())
    if worker.started_at_s == began_s or worker.holds:
        return True
    said = any(other.holds for other in run.workers.values())
    return not said and worker.ready_at_s + settled_s <= at_s


def paused(run: Run) -> list[Worker]:
    """Workers that saved and left on request."""
    return [worker for worker in run.workers.values() if worker.exit is not None and worker.exit.outcome == "paused"]


def lost_with_node(worker: Worker) -> bool:
    """True if it was given up with its node: nothing that it did."""
    return worker.exit is not None and worker.exit.failure is not None and worker.exit.failure.code == "node-lost"


def crash_looping(run: Run) -> bool:
    return exact(run) and run.deaths_without_progress >= MAX_DEATHS_WITHOUT_PROGRESS


def ending_words(worker: Worker) -> str:
    """`worker 1 was killed by signal 9`, `worker 0 exited with code 3`."""
    ending = worker.exit
    assert ending is not None
    if ending.failure is not None and lost_with_node(worker):
        return ending.failure.message
    if ending.outcome == "unknown":
        return f"worker {worker.index} vanished"
    if ending.outcome == "failed" and ending.code is None:
        return f"worker {worker.index} could not be started"
    if ending.signal is not None:
        return f"worker {worker.index} was killed by signal {ending.signal}"
    if ending.outcome == "killed":
        return f"worker {worker.index} was killed"
    return f"worker {worker.index} exited with code {ending.code}"


def failure_of(run: Run, worker: Worker, others: int) -> Failure:
    """What the worker's end means to its user: its own account where it left one."""
    ending = worker.exit
    assert ending is not None
    name = worker_id(run.id, worker.attempt, worker.index)
    if ending.failure is not None:
        own = ending.failure
        rank = worker.rank if own.rank is None else own.rank
        return replace(own, rank=rank, worker=own.worker or name, others=others)
    code = {"unknown": "worker-lost", "killed": "worker-killed"}.get(ending.outcome, "worker-exited")
    return Failure(code=code, message=ending_words(worker), rank=worker.rank, worker=name, others=others)


def crash_loop_failure(run: Run) -> Failure:
    last = dead(run)[-1:]
    words = f", at last {ending_words(last[0])}" if last else ""
    return Failure(
        code="crash-loop",
        message=f"workers died {run.deaths_without_progress} times without one new step being committed{words}",
        hint=f"racimo logs {run.id}",
        worker=worker_id(run.id, run.attempt, last[0].index) if last else "",
    )
