"""What is true: the state of the cluster as a fold of the journal.

`apply` is total and deterministic: the same records give the same state, on any machine, today and after a restart.
Events about an older attempt, or about a worker whose exit is recorded, change nothing: the attempt's number is the
fence. Nothing here decides; see `racimo.decide`.
"""

from collections.abc import Iterable
from typing import Any, Literal, assert_never

from msgspec.structs import replace

from racimo.state import events as ev
from racimo.state import fold_nodes, fold_studies
from racimo.state.nouns import Exit, Failure, Generation, Placement, Reason, Run, Worker, worker_id
from racimo.state.state import State
from racimo.state.study import Study

__all__ = ["LEAVING_RANK", "State", "apply", "fold"]

SECONDS_PER_HOUR = 3600.0
DEATHS_TOGETHER_S = 1.0
"""Workers of an attempt that die within this time died of one cause: they count once towards a crash loop."""

MAX_GONE_WORKERS = 100
"""So many replaced workers of an attempt are remembered."""

RUN_NUMBERS_SKIPPED_BY_CUT = 1_000
"""More than a damaged tail can have held: nodes may still keep what those runs left under their names."""

MAX_FORGOTTEN_KEPT = 200
"""Names of forgotten runs that are kept, so that a node whose word was lost can be told again."""

LEAVING_RANK = {"": 0, "release": 1, "pause": 2, "stop": 3, "abort": 4}
"""A stronger way to leave replaces a weaker one, never the reverse."""


def fold(records: Iterable[ev.Record], state: State | None = None) -> State:
    """The state after `records`, from the beginning or from `state` (which is changed)."""
    state = State() if state is None else state
    for record in records:
        apply(state, record)
    return state


def apply(state: State, record: ev.Record) -> None:
    """Lets one record happen to `state`, in place. Records come in the order of `seq`, without gaps."""
    assert record.seq == state.seq + 1, f"record {record.seq} after {state.seq}"
    state.seq, state.at_s = record.seq, record.at_s
    event = record.event
    match event:
        case ev.RunSubmitted():
            _submit(state, event, record.at_s)
        case (
            ev.NodeJoined()
            | ev.NodeSilent()
            | ev.NodeStuck()
            | ev.NodeLost()
            | ev.NodeForgotten()
            | ev.DrainRequested()
        ):
            fold_nodes.apply(state, event, record.at_s)
        case ev.JournalCut():
            state.num_submitted = max(event.newest_run, state.num_submitted + RUN_NUMBERS_SKIPPED_BY_CUT)
        case ev.RunForgotten():
            _forget(state, event.run)
        case ev.PairUnreachable():
            _unreachable(state, event, record.at_s)
        case ev.WorkersLost():
            _lose(state, event, record.at_s)
        case ev.TrialsProposed() | ev.StudyChanged() | ev.SliceGranted() | ev.SliceEnded() | ev.TrialEnded():
            fold_studies.apply(state, event, record.at_s)
        case ev.WorkerStarted() | ev.WorkerReady() | ev.WorkerExited() | ev.WorkerHung():
            _worker_event(state, event, record.at_s)
        case _:
            run = state.runs.get(event.run)
            if run is not None and not run.ended:
                _run_event(state, run, event, record.at_s)


def _submit(state: State, event: ev.RunSubmitted, at_s: float) -> None:
    if event.run in state.runs:
        return
    workers = event.spec.size_range
    state.num_submitted += 1
    state.runs[event.run] = Run(
        id=event.run,
        spec=event.spec,
        order=state.num_submitted,
        submitted_at_s=at_s,
        submitted_wall_s=event.wall_s,
        queued_at_s=at_s,
        least=workers.least,
        most=workers.most,
    )
    state.open_runs[event.run] = None
    if event.spec.study is not None:
        state.studies[event.run] = Study(event.spec.study)
    if event.request:
        state.requests[event.request] = event.run


def _forget(state: State, run_id: str) -> None:
    run = state.runs.get(run_id)
    if run is None or not run.ended or run.live_workers:
        return
    del state.runs[run_id]
    state.studies.pop(run_id, None)
    state.requests = {request: run for request, run in state.requests.items() if run != run_id}
    kept = list(state.forgotten.items())[1 - MAX_FORGOTTEN_KEPT :]
    state.forgotten = {**dict(kept), run_id: run.nodes}


WorkerEvent = ev.WorkerStarted | ev.WorkerReady | ev.WorkerExited | ev.WorkerHung
RunEvent = (
    ev.StopRequested | ev.PauseRequested | ev.ResumeRequested | ev.ScaleRequested
    | ev.AttemptPlanned | ev.WorkersPlanned | ev.WorkersLeaving | ev.GenerationAnnounced
    | ev.RunRequeued | ev.RunPaused | ev.RunEnded
)  # fmt: skip


def _worker_event(state: State, event: WorkerEvent, at_s: float) -> None:
    run = state.runs.get(event.run)
    worker = state.worker(event.run, event.attempt, event.index)
    if run is None or worker is None or not worker.live:
        return
    match event:
        case ev.WorkerStarted():
            status = "ready" if worker.status == "ready" else "running"
            state.runs[run.id] = _with_worker(run, replace(worker, pid=event.pid, status=status))
        case ev.WorkerReady():
            ready = replace(
                worker,
                status="ready",
                address=event.address,
                numerics=event.numerics,
                ready_at_s=worker.ready_at_s or at_s,
                holds=worker.holds or event.holds,
            )
            state.runs[run.id] = _with_worker(run, ready, elastic=True, micro_shards=event.micro_shards)
        case ev.WorkerExited():
            _exit(state, run, worker, event, at_s)
        case ev.WorkerHung():
            if run.failure is None and worker.leaving not in ("stop", "abort"):
                state.runs[run.id] = replace(run, failure=event.failure)
        case _:
            assert_never(event)


def _exit(state: State, run: Run, worker: Worker, event: ev.WorkerExited, at_s: float) -> None:
    changes: dict[str, Any] = {"device_s": run.device_s + event.exit.held_s * run.num_devices_of(worker)}
    if event.exit.outcome in ("killed", "unknown") and not worker.leaving and _counts_as_crash(run, worker, at_s):
        progressed = event.commits > run.commits_at_death
        changes["deaths_without_progress"] = 1 if progressed else run.deaths_without_progress + 1
        changes["commits_at_death"] = max(event.commits, run.commits_at_death)
    if run.status == "paused":
        changes["status"] = "pausing"  # frozen, and one of its processes ended: to be looked at again
    _end(state, run, worker, event.exit, at_s, changes)


def _end(state: State, run: Run, worker: Worker, ending: Exit, at_s: float, changes: dict[str, Any]) -> None:
    ended = replace(worker, status="exited", exit=ending, exited_at_s=at_s)
    device_s = ending.held_s * run.num_devices_of(worker)
    node = state.nodes.get(worker.node)
    if node is not None:
        changes["cost"] = run.cost + device_s / SECONDS_PER_HOUR * node.price_per_device_hour
        changes["priced_device_s"] = run.priced_device_s + device_s
    state.runs[run.id] = _with_worker(run, ended, **changes)
    fold_studies.lose(state, run, worker, at_s)
    state.release(run.id, worker)
    fold_nodes.settle_drain(state, worker.node)


def _lose(state: State, event: ev.WorkersLost, at_s: float) -> None:
    """Nobody saw how they ended. It is no crash of theirs, so it does not count towards a crash loop."""
    for index in event.indices:
        run, worker = state.runs.get(event.run), state.worker(event.run, event.attempt, index)
        if run is None or worker is None or not worker.live:
            continue
        failure = Failure(
            code="node-lost",
            message=f"worker {index} was lost with its node {worker.node}",
            hint="racimo nodes",
            rank=worker.rank,
            worker=worker_id(run.id, worker.attempt, index),
        )
        held_s = max(0.0, at_s - worker.started_at_s)
        if worker.paid_s:
            held_s = min(held_s, worker.paid_s)  # its agent, or its machine's end, has ended it by then
        changes: dict[str, Any] = {"device_s": run.device_s + held_s * run.num_devices_of(worker)}
        if run.status == "paused":
            changes["status"] = "pausing"  # as in `_exit`
        _end(state, run, worker, Exit(outcome="unknown", failure=failure, held_s=held_s), at_s, changes)


def _unreachable(state: State, event: ev.PairUnreachable, at_s: float) -> None:
    run = state.runs.get(event.run)
    one, other = (state.worker(event.run, event.attempt, index) for index in (event.index, event.other))
    if run is None or one is None or other is None or one.node == other.node:
        return
    fold_nodes.note_unreachable(state, one.node, other.node, at_s)
    pairs = tuple(pair for pair in run.unreachable if all(run.workers[index].live for index in pair))
    state.runs[run.id] = replace(run, unreachable=(*pairs, (event.index, event.other)))


def _counts_as_crash(run: Run, dead: Worker, at_s: float) -> bool:
    """Not where another worker died just before (one cause), and not a newcomer beside members that go on."""
    others = [other for other in run.workers.values() if other.index != dead.index]
    if (
        run.generation is not None
        and dead.status != "ready"
        and any(other.live and other.status == "ready" for other in others)
    ):
        return False
    return not any(
        other.exit is not None
        and other.exit.outcome in ("killed", "unknown")
        and not other.leaving
        and at_s - other.exited_at_s < DEATHS_TOGETHER_S
        for other in others
    )


def _run_event(state: State, run: Run, event: RunEvent, at_s: float) -> None:
    match event:
        case ev.StopRequested():
            reason = Reason(code="stop-requested", text="stop was asked for")
            state.runs[run.id] = replace(run, status="stopping", hold="", reason=reason)
        case ev.PauseRequested():
            state.runs[run.id] = _pause(run, "paused" if event.until == "resume" else "down")
        case ev.ResumeRequested():
            state.runs[run.id] = _resume(run, at_s)
        case ev.ScaleRequested():
            state.runs[run.id] = replace(run, least=event.least, most=event.most)
        case ev.AttemptPlanned():
            _begin_attempt(state, run, event, at_s)
        case ev.WorkersPlanned():
            if event.attempt == run.attempt:
                _add_workers(state, replace(run, reason=event.reason), event.placements, at_s)
        case ev.WorkersLeaving():
            if event.attempt == run.attempt:
                state.runs[run.id] = _mark_leaving(run, event)
        case ev.GenerationAnnounced():
            if event.attempt == run.attempt:
                _announce(state, run, event)
        case ev.RunRequeued():
            state.runs[run.id] = _requeue(run, event, at_s)
        case ev.RunPaused():
            state.runs[run.id] = replace(_inactive(run, at_s), status="paused", reason=event.reason)
        case ev.RunEnded():
            state.open_runs.pop(run.id, None)
            run = _inactive(run, at_s)
            state.runs[run.id] = replace(
                run, status=event.status, reason=event.reason, failure=event.failure, ended_at_s=at_s, hold=""
            )
        case _:
            assert_never(event)


def _pause(run: Run, hold: Literal["paused", "down"]) -> Run:
    if run.status == "queued":
        until = f"`racimo resume {run.id}`" if hold == "paused" else "the cluster's next `racimo up`"
        reason = Reason(code="held", text=f"paused while it waited; {until} lets it queue again")
        return replace(run, status="paused", hold=hold, reason=reason)
    if run.status in ("running", "pausing"):
        return replace(run, status="pausing", hold=hold)
    return run


def _resume(run: Run, at_s: float) -> Run:
    if run.status == "paused" and not run.live_workers:
        reason = Reason(code="resumed", text="resumed: it queues for its devices again")
        return replace(run, status="queued", hold="", queued_at_s=at_s, reason=reason)
    if run.status == "paused":  # frozen in place: the same processes go on
        workers = {
            w.index: replace(w, leaving="") if w.live and w.leaving == "pause" else w for w in run.workers.values()
        }
        reason = Reason(code="resumed", text="resumed: its processes go on where they were frozen")
        return replace(run, status="running", hold="", workers=workers, reason=reason, active_since_s=at_s)
    if run.status == "pausing":
        undecided = not any(worker.leaving == "pause" for worker in run.workers.values())
        return replace(run, status="running" if undecided else "pausing", hold="")
    return run


def _begin_attempt(state: State, run: Run, event: ev.AttemptPlanned, at_s: float) -> None:
    if event.attempt != run.attempt + 1 or run.live_workers:
        return
    begun = replace(
        run,
        status="running",
        attempt=event.attempt,
        workers={},
        unreachable=(),
        next_index=0,
        elastic=False,
        generation=None,
        failure=None,
        reason=event.reason,
        started_at_s=at_s if run.started_at_s is None else run.started_at_s,
        active_since_s=at_s,
    )
    _add_workers(state, begun, event.placements, at_s)


def _add_workers(state: State, run: Run, placements: tuple[Placement, ...], at_s: float) -> None:
    workers = dict(run.workers)
    for place in placements:
        worker = Worker(
            index=place.index,
            attempt=run.attempt,
            node=place.node,
            devices=place.devices,
            rank=place.index,
            started_at_s=at_s,
            paid_s=place.paid_s,
        )
        workers[place.index] = worker
        state.lease(run.id, worker)
    next_index = max((run.next_index, *(place.index + 1 for place in placements)))
    nodes = tuple(dict.fromkeys((*run.nodes, *(place.node for place in placements))))
    state.runs[run.id] = replace(run, workers=workers, nodes=nodes, next_index=next_index)


def _mark_leaving(run: Run, event: ev.WorkersLeaving) -> Run:
    workers = dict(run.workers)
    for index in event.indices:
        worker = workers.get(index)
        if worker is not None and worker.live and LEAVING_RANK[event.how] > LEAVING_RANK[worker.leaving]:
            workers[index] = replace(worker, leaving=event.how)
    return replace(run, workers=workers, failure=run.failure or event.failure, reason=event.reason)


def _announce(state: State, run: Run, event: ev.GenerationAnnounced) -> None:
    if event.number < run.next_generation:
        return
    generation = Generation(number=event.number, members=event.members, reason=event.reason)
    state.runs[run.id] = replace(
        run,
        generation=generation,
        next_generation=event.number + 1,
        reason=event.reason,
        workers=_without_long_gone(run, event.members),
    )


def _without_long_gone(run: Run, members: tuple[int, ...]) -> dict[int, Worker]:
    """Its workers less the oldest of those that died and were replaced, so that a run may heal for months."""
    gone = [w for w in run.workers.values() if w.exit is not None and w.exit.outcome != "finished"]
    gone = sorted((w for w in gone if w.index not in members), key=lambda worker: worker.exited_at_s)
    dropped = {worker.index for worker in gone[: max(0, len(gone) - MAX_GONE_WORKERS)]}
    return {index: worker for index, worker in run.workers.items() if index not in dropped}


def _inactive(run: Run, at_s: float) -> Run:
    return replace(run, active_s=run.active_until(at_s), active_since_s=None)


def _requeue(run: Run, event: ev.RunRequeued, at_s: float) -> Run:
    return replace(
        _inactive(run, at_s),
        status="paused" if run.hold else "queued",
        queued_at_s=at_s,
        retries_used=run.retries_used + event.retry,
        deaths_without_progress=0 if event.retry else run.deaths_without_progress,
        elastic=False,
        generation=None,
        failure=None,
        reason=event.reason,
    )


def _with_worker(run: Run, worker: Worker, **changes: Any) -> Run:
    return replace(run, workers={**run.workers, worker.index: worker}, **changes)
