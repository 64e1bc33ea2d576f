"""What happens to the trials of tune runs, as a part of the fold."""

from msgspec.structs import replace

from racimo.state import events as ev
from racimo.state.nouns import Reason, Run, Worker
from racimo.state.state import State
from racimo.state.study import Bill, Study, StudyEvent


def apply(state: State, event: StudyEvent, at_s: float) -> None:
    """Lets one event about a study happen to `state`, in place. To one that is over nothing happens, but that new terms
    open it again.

    A slice may end under an attempt that is over: its number tells it from all others."""
    run, study = state.runs.get(event.run), state.studies.get(event.run)
    if run is None or study is None or (run.ended and not isinstance(event, ev.StudyChanged)):
        return
    if isinstance(event, ev.StudyChanged):
        _reopen(state, run, event, at_s)
    bill = None
    if isinstance(event, ev.SliceEnded):
        worker = state.worker(event.run, event.attempt, event.index)
        bill = _bill(state, run, worker) if worker is not None else None
    study.apply(event, state.seq, at_s, bill)
    if isinstance(event, ev.SliceGranted):
        _pay(state, run, study, event)
    if isinstance(event, ev.SliceEnded) and event.result.metrics and run.deaths_without_progress:
        state.runs[run.id] = replace(run, deaths_without_progress=0)  # what its workers do is of use


def _pay(state: State, run: Run, study: Study, event: ev.SliceGranted) -> None:
    """With a slice its worker's life is paid for up to some age; that never gets less."""
    worker = state.worker(run.id, event.attempt, event.grant.worker)
    if worker is not None and study.grant_of(worker.index) == event.grant and event.grant.paid_s > worker.paid_s:
        paid = replace(worker, paid_s=event.grant.paid_s)
        state.runs[run.id] = replace(run, workers={**run.workers, worker.index: paid})


def _reopen(state: State, run: Run, event: ev.StudyChanged, at_s: float) -> None:
    spec = replace(run.spec, study=event.study)
    sizes = spec.size_range
    run = replace(run, spec=spec, least=sizes.least, most=sizes.most)
    if run.ended:
        reason = Reason(code="reopened", text="goes on under new terms")
        run = replace(run, status="queued", queued_at_s=at_s, ended_at_s=None, failure=None, hold="", reason=reason)
        state.open_runs[run.id] = None
    state.runs[run.id] = run


def lose(state: State, run: Run, worker: Worker, at_s: float) -> None:
    """A worker has ended; if it ran a slice, that is lost with it."""
    study = state.studies.get(run.id)
    if study is not None:
        study.lose(worker.index, state.seq, at_s, _bill(state, run, worker), asked=bool(worker.leaving))


def _bill(state: State, run: Run, worker: Worker) -> Bill:
    node = state.nodes.get(worker.node)
    price = node.price_per_device_hour if node is not None else 0.0
    return Bill(node=worker.node, num_devices=run.num_devices_of(worker), price_per_device_hour=price)
