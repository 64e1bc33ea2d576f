"""Which sizes a run may be given by `scale`, and which size to type instead."""

from racimo.decide.fit import Pool, ask_of_spec, can_never_fit
from racimo.spec.errors import RacimoError
from racimo.spec.quantity import WorkerRange
from racimo.state.fold import State
from racimo.state.nouns import Run


def check_scale(state: State, run: Run, workers: WorkerRange) -> None:
    """`RacimoError`: `invalid-request` (a range for a command), `wrong-state` (running and not elastic),
    `can-never-fit`, `too-many-workers`."""
    if run.spec.command and workers.elastic:
        raise RacimoError("invalid-request", f"a command has a fixed count of workers, not {workers}")
    if not run.elastic and run.live_workers:
        raise RacimoError(
            "wrong-state",
            f"{run.id} is {run.status} and not elastic: only runs inside `run.steps` change size while they run",
            f"racimo stop {run.id}",
        )
    reason = can_never_fit(state, run.spec, workers.least)
    if reason is not None:
        raise RacimoError("can-never-fit", reason.text, _size_that_can_be(state, run))
    if run.micro_shards is not None and workers.most > run.micro_shards:
        raise RacimoError(
            "too-many-workers",
            f"{run.id} cuts each batch into {run.micro_shards} micro-shards, so it can have at most"
            f" {run.micro_shards} workers, not {workers.most}",
            _size_that_can_be(state, run),
        )


def _size_that_can_be(state: State, run: Run) -> str:
    """The command for the largest size that the cluster and the run's micro-shards allow, the run's least kept."""
    most = Pool.whole(state).room(ask_of_spec(run.spec))
    if run.micro_shards is not None:
        most = min(most, run.micro_shards)
    if most < 1 or can_never_fit(state, run.spec, most) is not None:
        return "racimo nodes  # shows what there is"
    least = most if run.spec.command else min(run.least, most)
    return f"racimo scale {run.id} {WorkerRange(least, most)}"
