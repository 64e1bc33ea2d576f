"""The calls about the trials of tune runs."""

import asyncio
import contextlib

from racimo.control.core import Core
from racimo.control.exchange import Exchange
from racimo.control.loop import Loop
from racimo.control.views import StudyRequest, StudyView, TrialView
from racimo.spec.errors import RacimoError
from racimo.state.nouns import Run, worker_id
from racimo.state.study import Study
from racimo.state.trials import Trial

MAX_WAIT_S = 60.0


async def trials(loop: Loop, exchange: Exchange, run_id: str) -> None:
    """What changed after record `after`; waits up to `wait_s` for a change."""
    after = int(exchange.number("after", -1, -1, 2**53))
    wait_s = exchange.number("wait_s", 0.0, 0.0, MAX_WAIT_S)
    study = study_of(loop.core, run_id)
    with contextlib.suppress(TimeoutError):  # then it is answered as it is
        async with asyncio.timeout(wait_s):
            while True:
                pulse = loop.pulse(run_id)
                run = loop.core.state.runs[run_id]
                if study.changed_at > after or run.ended or not wait_s:
                    break
                await pulse.wait()
    await exchange.answer(study_view(loop.core.state.runs[run_id], study, after, loop.core.state.seq))


async def change(loop: Loop, exchange: Exchange, run_id: str) -> None:
    request = await exchange.read(StudyRequest)
    await loop.change(lambda core: core.change_study(run_id, request.study, request.other_space))
    await exchange.answer(
        study_view(loop.core.state.runs[run_id], study_of(loop.core, run_id), -1, loop.core.state.seq)
    )


def study_of(core: Core, run_id: str) -> Study:
    """`RacimoError`: `run-unknown`, `wrong-state` if it has no trials."""
    run = core.run(run_id)
    study = core.state.studies.get(run_id)
    if study is None:
        raise RacimoError(
            "wrong-state", f"{run_id} is a {run.spec.kind} run: it has no trials", f"racimo show {run_id}"
        )
    return study


def study_view(run: Run, study: Study, after: int, seq: int) -> StudyView:
    best = study.best
    return StudyView(
        seq=seq,
        counts={status: count for status, count in study.counts.items() if count},
        best=best.number if best is not None else None,
        num_trials=len(study.trials),
        device_s=study.device_s,
        cost=study.cost,
        trials=tuple(_trial_view(run, trial) for trial in study.changed_since(after)),
    )


def _trial_view(run: Run, trial: Trial) -> TrialView:
    running = trial.grant is not None and trial.status == "running"
    return TrialView(
        number=trial.number,
        status=trial.status,
        values=trial.values,
        by=trial.by,
        rounds=trial.rounds,
        step=trial.step,
        metrics=trial.metrics,
        curve=trial.curve,
        worker=worker_id(run.id, run.attempt, trial.grant.worker) if running and trial.grant is not None else "",
        device_s=trial.device_s,
        cost=trial.cost,
        retries=trial.retries,
        reason=trial.reason,
        failure=trial.failure,
    )
