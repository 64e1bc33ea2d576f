"""How attempts and runs end: finishing, failing, retrying, stopping, pausing."""

from typing import Literal

from racimo.decide import exits
from racimo.state.events import Intent, RunEnded, RunPaused, RunRequeued, WorkersLeaving
from racimo.state.fold import LEAVING_RANK
from racimo.state.nouns import Failure, Reason, Run, Worker

How = Literal["stop", "pause", "release", "abort"]


def close(run: Run) -> Intent:
    """What becomes of a run whose workers have all ended (or that is stopped before it had any)."""
    if run.status == "stopping":
        return RunEnded(run=run.id, status="stopped", reason=Reason(code="stopped", text="stopped on request"))
    if run.failure is not None and not _finished_in_time(run):
        return _failed(run, run.failure, "failed")
    culprits = exits.culprits(run)
    if culprits:
        failure = exits.failure_of(run, culprits[0], len(culprits) - 1)
        return _failed(run, failure, "lost" if failure.code in ("worker-lost", "node-lost") else "failed")
    if exits.crash_looping(run):
        failure = exits.crash_loop_failure(run)
        return _ended(run, failure, "failed")
    unhealed, finished, paused = exits.unhealed(run), exits.finished(run), exits.paused(run)
    if _finished_in_time(run):
        finished = list(run.workers.values())
    if finished and not unhealed and not paused:
        counts: dict[str, int | float] = {"workers": len(finished)}
        reason = Reason(code="finished", text=_count(len(finished), "worker") + " finished", counts=counts)
        return RunEnded(run=run.id, status="succeeded", reason=reason)
    if run.hold:
        again = (
            f"`racimo resume {run.id}` goes on" if run.hold == "paused" else "it goes on when the cluster is up again"
        )
        held = Reason(code="paused", text=f"paused: saved and gone, its devices are free; {again}")
        return RunPaused(run=run.id, reason=held)
    return RunRequeued(run=run.id, reason=_requeue_reason(run, unhealed, finished))


def _finished_in_time(run: Run) -> bool:
    """True if its code came to its end in the grace that it was given to leave a drained node: never done again."""
    endings = [worker.exit for worker in run.workers.values()]
    drained = run.failure is not None and run.failure.code == "node-drained"
    return drained and all(ending is not None and ending.outcome == "finished" for ending in endings)


def wind_down(run: Run) -> list[Intent]:
    """What ends the workers of an attempt that is to end or to be paused; nothing while it goes on."""
    verdict = _verdict(run)
    if verdict is not None:
        how, reason, workers = verdict
        return leaving(run, how, reason, workers)
    return pause(run) if run.status == "pausing" and run.hold else []


def ending(run: Run) -> bool:
    """True if this attempt's workers are all on their way out (nothing heals or grows any more)."""
    nobody_stays = all(worker.leaving for worker in run.live_workers)
    return run.status != "running" or nobody_stays or _verdict(run) is not None


def _saving(run: Run) -> bool:
    """True if all save and leave though nobody asked for a pause: their node is to be empty by now."""
    return any(worker.live and worker.leaving == "pause" for worker in run.workers.values())


def _verdict(run: Run) -> tuple[How, Reason, list[Worker]] | None:
    live = run.live_workers
    if run.status == "stopping":
        return "stop", Reason(code="stopping", text=f"stop was asked for: {_count(len(live), 'worker')} to end"), live
    if run.failure is not None and run.failure.code == "node-drained":
        return "stop", Reason(code=run.failure.code, text=f"{run.failure.message}: its workers are to end"), live
    if run.failure is not None:
        return "abort", Reason(code=run.failure.code, text=f"{run.failure.message}: the others are ended"), live
    culprits = exits.culprits(run)
    if culprits:
        first = culprits[0]
        text = f"{exits.ending_words(first)}: {_count(len(live), 'other worker')} to end"
        gentle = not exits.exact(run) and first.exit is not None and first.exit.outcome == "failed"
        return "stop" if gentle else "abort", Reason(code="worker-failed", text=text), live
    if exits.crash_looping(run):
        return "abort", Reason(code="crash-loop", text=exits.crash_loop_failure(run).message), live
    return _lost_state(run, live)


def _lost_state(run: Run, live: list[Worker]) -> tuple[How, Reason, list[Worker]] | None:
    """An exact attempt in which nobody is left who holds the state of the last step, or a member is done already."""
    absent = exits.not_started(run)
    dead = [worker for worker in exits.dead(run) if worker not in absent]
    if exits.exact(run) and not run.elastic and dead:
        text = f"{exits.ending_words(dead[0])} before it was ready: the attempt begins anew"
        return "abort", Reason(code="begins-anew", text=text), live
    if exits.paused(run) and run.status == "running" and not _saving(run):
        text = "some workers had saved and left when the run was resumed: the attempt begins anew"
        return "abort", Reason(code="begins-anew", text=text), live
    if run.generation is None:
        return None
    outsiders = [worker for worker in live if worker.index not in run.generation.members]
    if exits.finished(run) and outsiders:
        text = f"the run is finishing: {_count(len(outsiders), 'newcomer')} not needed any more"
        return "abort", Reason(code="finishing", text=text), outsiders
    if outsiders and len(outsiders) == len(live) and not exits.finished(run):
        text = "no member of the last generation is left, so nobody holds the newest step: back to the checkpoint"
        return "abort", Reason(code="all-members-died", text=text), outsiders
    return None


def pause(run: Run) -> list[Intent]:
    live = run.live_workers
    if not run.elastic:
        devices = sum(len(worker.devices) for worker in live)
        text = f"frozen where it was: it is not elastic, so it keeps its {_count(devices, 'device')} meanwhile"
        reason = Reason(code="frozen", text=text, counts={"devices": devices, "workers": len(live)})
        return [*leaving(run, "pause", reason, live), RunPaused(run=run.id, reason=reason)]
    ready = [worker for worker in live if worker.status == "ready"]
    others = [worker for worker in live if worker.status != "ready"]
    reason = Reason(code="pausing", text=f"{_count(len(ready), 'worker')} to commit, save and leave")
    return [*leaving(run, "pause", reason, ready), *leaving(run, "abort", reason, others)]


def leaving(run: Run, how: How, reason: Reason, workers: list[Worker]) -> list[Intent]:
    indices = tuple(w.index for w in workers if w.live and LEAVING_RANK[w.leaving] < LEAVING_RANK[how])
    if not indices:
        return []
    return [WorkersLeaving(run=run.id, attempt=run.attempt, indices=indices, how=how, reason=reason)]


def _failed(run: Run, failure: Failure, status: Literal["failed", "lost"]) -> Intent:
    if run.retries_used < run.spec.retries:
        retry = run.retries_used + 1
        text = f"{failure.message}; retry {retry} of {run.spec.retries} follows"
        counts: dict[str, int | float] = {"retry": retry, "retries": run.spec.retries}
        return RunRequeued(run=run.id, retry=True, reason=Reason(code="retry", text=text, counts=counts))
    return _ended(run, failure, status)


def _ended(run: Run, failure: Failure, status: Literal["failed", "lost"]) -> Intent:
    text = failure.message
    if failure.others:
        text += f" (and {_count(failure.others, 'worker')} more failed after it)"
    if run.spec.retries:
        text += f"; {run.retries_used} of {_count(run.spec.retries, 'retry', 'retries')} used"
    return RunEnded(run=run.id, status=status, reason=Reason(code=failure.code, text=text), failure=failure)


def _requeue_reason(run: Run, unhealed: list[Worker], finished: list[Worker]) -> Reason:
    counts: dict[str, int | float] = {"died": len(unhealed), "finished": len(finished)}
    if unhealed and finished:
        text = (
            f"{exits.ending_words(unhealed[0])} after {len(finished)} had finished: goes back to the newest checkpoint"
        )
        return Reason(code="died-at-the-end", text=text, counts=counts)
    if unhealed:
        text = f"all workers died ({exits.ending_words(unhealed[-1])} last): goes on from its newest checkpoint"
        return Reason(code="all-workers-died", text=text, counts=counts)
    return Reason(code="resumed", text="resumed: goes on from where it was saved", counts=counts)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
