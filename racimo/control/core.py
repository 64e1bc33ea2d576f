"""The heart of the control process without I/O: facts in, journal, state, decisions, effects out.

The real control process and the simulation use this class unchanged; see `racimo.control.ledger` for its cycle.
"""

import msgspec

from racimo.act.journal import Journal
from racimo.agent.propose_protocol import Proposed
from racimo.agent.protocol import FileEntry, WorkerOrder
from racimo.control.facts import FIRST_EXEC_INDEX, Facts
from racimo.control.ledger import Clock, stop_effect
from racimo.control.orders import run_name, worker_order
from racimo.control.scaling import check_scale
from racimo.decide.away import Away
from racimo.decide.fit import can_never_fit
from racimo.decide.tune.accept import accept
from racimo.spec.errors import RacimoError
from racimo.spec.quantity import WorkerRange
from racimo.spec.run import RunSpec
from racimo.spec.space import differences
from racimo.spec.study import StudySpec
from racimo.state import events as ev
from racimo.state.nouns import Reason, Run, Worker, parse_worker_id

__all__ = ["FIRST_EXEC_INDEX", "MAX_QUEUED_RUNS", "Core", "TakenDown"]

MAX_QUEUED_RUNS = 1_000


class TakenDown(msgspec.Struct, frozen=True):
    """Runs that go on when the cluster is up again, and runs that end with it."""

    kept: tuple[str, ...]
    stopped: tuple[str, ...]


class Core(Facts):
    """One cluster's truth and its decisions. Opening it folds what `store` holds."""

    def __init__(self, store: Journal, clock: Clock) -> None:
        super().__init__(store, clock)
        self._going_down = False

    # What users ask

    def submit(self, spec: RunSpec, request: str) -> Run:
        """A new run, or the one that the same `request` made before.

        `RacimoError`: `can-never-fit` with the numbers, `queue-full`.
        """
        known = self.state.requests.get(request) if request else None
        if known is not None:
            return self.state.runs[known]
        if self._going_down:
            raise RacimoError("wrong-state", "the cluster is being taken down", "racimo up  # once it has ended")
        self.check_fit(spec)
        queued = sum(self.state.runs[run].status == "queued" for run in self.state.open_runs)
        if queued >= MAX_QUEUED_RUNS:
            raise RacimoError("queue-full", f"{queued} runs wait already, and {MAX_QUEUED_RUNS} may", "racimo ps")
        run = f"{run_name(spec)}-{self.state.num_submitted + 1}"
        self._record(ev.RunSubmitted(run=run, spec=spec, request=request, wall_s=self.clock.wall_s()))
        return self.state.runs[run]

    def check_fit(self, spec: RunSpec) -> None:
        """`RacimoError` can-never-fit, with the numbers, for what no node of the cluster will ever have room for."""
        reason = can_never_fit(self.state, spec, spec.worker_range.least)
        if reason is not None:
            hint = "racimo nodes   # shows what there is; more: racimo up --slots N, or racimo join on another machine"
            raise RacimoError("can-never-fit", reason.text, hint)

    def stop(self, run_id: str) -> Run:
        """Ends the run; nothing new if it is being stopped. `RacimoError`: `run-unknown`, `wrong-state` once ended."""
        run = self._open_run(run_id)
        if run.status != "stopping":
            self._record(ev.StopRequested(run=run_id))
        return self.state.runs[run_id]

    def pause(self, run_id: str) -> Run:
        """Holds the run until `resume`. `RacimoError`: `run-unknown`, `wrong-state`."""
        run = self._open_run(run_id)
        if run.status == "stopping":
            raise RacimoError("wrong-state", f"{run_id} is being stopped", f"racimo show {run_id}")
        if not run.hold:
            self._record(ev.PauseRequested(run=run_id))
        return self.state.runs[run_id]

    def resume(self, run_id: str) -> Run:
        """Lets a paused run go on. `RacimoError`: `run-unknown`, `wrong-state` if it is not paused."""
        run = self._open_run(run_id)
        if not run.hold:
            raise RacimoError("wrong-state", f"{run_id} is {run.status}, not paused", f"racimo show {run_id}")
        frozen = [w for w in run.live_workers if w.leaving == "pause"] if run.status == "paused" else []
        self._record(ev.ResumeRequested(run=run_id))
        for worker in frozen:
            self._effect(stop_effect(run, worker, "thaw"))
        return self.state.runs[run_id]

    def take_down(self) -> TakenDown:
        """The cluster is to end: what waits and exact training are held until it is up again, the rest is stopped."""
        self._going_down = True
        kept: list[str] = []
        stopped: list[str] = []
        for run in [self.state.runs[run_id] for run_id in self.state.open_runs]:
            if run.status == "paused" and not run.live_workers:
                kept.append(run.id)
            elif run.status == "queued" or (run.elastic and run.status in ("running", "pausing")):
                kept.append(run.id)
                if not run.hold:
                    self._record(ev.PauseRequested(run=run.id, until="up"))
            else:
                stopped.append(run.id)
                if run.status != "stopping":
                    self._record(ev.StopRequested(run=run.id))
        return TakenDown(kept=tuple(kept), stopped=tuple(stopped))

    def come_up(self) -> None:
        """What was held while the cluster was down queues again. Leases on nodes that are away count from now: the
        clock between two processes is the wall's, and may have jumped."""
        for node in [node for node in self.state.nodes.values() if node.status != "up"]:
            self._record(ev.NodeSilent(node=node.id))
        for run in [self.state.runs[run_id] for run_id in self.state.open_runs]:
            if run.hold == "down":
                self._record(ev.ResumeRequested(run=run.id))

    def scale(self, run_id: str, workers: WorkerRange) -> Run:
        """Changes how many workers the run may have.

        `RacimoError`: `run-unknown`, `wrong-state` (ended, or running and not elastic), `too-many-workers`,
        `can-never-fit`, `invalid-request` (a range for a command).
        """
        run = self._open_run(run_id)
        check_scale(self.state, run, workers)
        if (run.least, run.most) != (workers.least, workers.most):
            self._record(ev.ScaleRequested(run=run_id, least=workers.least, most=workers.most))
        return self.state.runs[run_id]

    def change_study(self, run_id: str, terms: StudySpec, other_space: bool) -> Run:
        """The tune run goes on under these terms.

        One that has ended is open again. `RacimoError`: `run-unknown`, `wrong-state` (no tune run), `space-changed`
        (with what changed) unless `other_space` says that it is meant.
        """
        run = self.run(run_id)
        study = self.state.studies.get(run_id)
        if study is None:
            raise RacimoError("wrong-state", f"{run_id} is a {run.spec.kind} run: it has no study", "racimo ps")
        changed = differences(study.space, terms.parsed_space)
        if changed and not other_space:
            raise RacimoError("space-changed", "the space is another than before: " + "; ".join(changed[:20]),
                              "say that you mean it: --other-space")  # fmt: skip
        if terms != study.terms or run.ended:
            self._record(ev.StudyChanged(run=run_id, study=terms))
        return self.state.runs[run_id]

    def take_proposals(self, run_id: str, terms: StudySpec, first: int, count: int, proposed: Proposed) -> None:
        """The answer to "`count` points for the trials from `first` on"; dropped if the study has changed since."""
        run, study = self.state.runs.get(run_id), self.state.studies.get(run_id)
        if run is None or study is None or run.ended or len(study.trials) != first or study.terms != terms:
            return
        if proposed.failure is not None:
            self._record(ev.TrialsProposed(run=run_id, first=first, proposals=(), failure=proposed.failure))
        else:
            self._record(accept(study, run_id, run.spec.seed, count, proposed.proposals))

    # What is known

    def why(self, run_id: str) -> Reason:
        """Why the run is where it is: the planner's own words. `RacimoError`: `run-unknown`."""
        run = self.run(run_id)
        reason = Away(self.state, self._now_s()).why(run) or self.waits.get(run_id) or run.reason
        return reason or Reason(code="submitted", text="submitted; the next decision places it")

    def run(self, run_id: str) -> Run:
        """`RacimoError`: `run-unknown`."""
        run = self.state.runs.get(run_id)
        if run is None:
            raise RacimoError("run-unknown", f"there is no run {run_id!r}", "racimo ps --all")
        return run

    def reachable_workers(self, run_id: str) -> list[Worker]:
        """Live workers on nodes that answer: those whose end can be waited for."""
        return [worker for worker in self.run(run_id).live_workers if self._answers(worker.node)]

    def order_for(
        self, worker: str, files: tuple[FileEntry, ...] = (), secrets: dict[str, str] | None = None
    ) -> WorkerOrder:
        """The order for a worker of the present attempt, as named by a `Start`."""
        run_id, attempt, index = parse_worker_id(worker)
        found = self.state.worker(run_id, attempt, index)
        assert found is not None, worker
        return worker_order(self.state.runs[run_id], found, self.state.nodes, files, secrets)

    # Within

    def _open_run(self, run_id: str) -> Run:
        run = self.run(run_id)
        if run.ended:
            raise RacimoError("wrong-state", f"{run_id} has ended already: {run.status}", f"racimo show {run_id}")
        return run
