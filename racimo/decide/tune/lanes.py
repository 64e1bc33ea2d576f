"""The workers of a tune run: how many it needs, and what each of them does next.

Every worker runs one trial at a time, slice by slice, and none needs another: workers come, go and die one by one, and
the run goes on as long as its study has something to do.
"""

from collections.abc import Collection, Mapping
from typing import Literal

from msgspec.structs import replace

from racimo.decide import end, exits, heal
from racimo.decide.fit import Pool
from racimo.decide.tune.ahead import num_ahead
from racimo.decide.tune.draw import propose
from racimo.decide.tune.purse import Prepaid, Purse
from racimo.decide.tune.schedule import (
    Begin,
    Clone,
    End,
    Go,
    Move,
    Scheduler,
    num_going_on,
    num_new,
    scheduler_of,
)
from racimo.state.events import (
    Intent,
    RunEnded,
    RunPaused,
    RunRequeued,
    SliceGranted,
    TrialEnded,
    TrialsProposed,
    WorkersPlanned,
)
from racimo.state.nouns import Failure, Node, Placement, Reason, Run, Worker
from racimo.state.study import Study
from racimo.state.trials import Grant, Proposal, Trial

MOST_FAILED_IN_A_ROW = 5
"""Trials; where so many failed and none ever told its metric, the function is at fault and the study ends."""

Verdict = tuple[Literal["succeeded", "failed"], Reason, Failure | None]


class Lanes:
    """One tune run's next moves, from its study as it is."""

    def __init__(
        self,
        run: Run,
        study: Study,
        now_s: float,
        draining: Collection[str] = (),
        nodes: Mapping[str, Node] | None = None,
    ) -> None:
        self.run, self.study = run, study
        self.due: list[float] = []
        """When to look again, even if nothing happens."""
        self.wants = 0
        """Trials that are to be proposed by a process that learns, before a free worker can go on."""
        self._now_s = now_s
        self._draining = draining
        self._scheduler: Scheduler = scheduler_of(study, run.spec.seed)
        self._purse = Purse(run, study, nodes or {}, now_s)

    def steer(self) -> list[Intent]:
        """For a run with workers: what ends, what is halted, what is granted."""
        ending = self._wind_down()
        if ending:
            return ending
        if self.run.status != "running":
            return []
        return self._leave_unpaid() or self._leave_nodes() or self._serve() or self._send_home()

    def grow(self, pool: Pool) -> list[WorkersPlanned]:
        """More workers on free devices, if they would have something to do."""
        if self.run.status != "running" or self._verdict() is not None:
            return []
        at_s = heal.may_grow_at_s(self.run) if self.run.elastic else 0.0
        if at_s is None or at_s > self._now_s:
            return []
        staying = len(heal.staying(self.run))
        more = self._purse.num_startable(max(0, self.num_useful - staying))
        planned = heal.fill_up(self.run, pool, staying + more, "grows")
        return [replace(planned, placements=self.pay(planned.placements))] if planned is not None else []

    @property
    def num_useful(self) -> int:
        """Workers that would have something to do, up to what the run may have."""
        study = self.study
        more = len(study.waiting) + num_new(study) + num_going_on(study)
        if not more:
            more = self._scheduler.otherwise(study, ()) is not None
        return min(self.run.most, len(study.running) + more)

    @property
    def num_startable(self) -> int:
        """With how many workers an attempt may begin: 0 if the study has no money or time left."""
        return self._purse.num_startable(self.run.most)

    def pay(self, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
        """Placements of new workers, with what is paid for each."""
        return self._purse.pay(placements)

    def close(self) -> Intent:
        """What becomes of the run once it has no workers."""
        run = self.run
        if run.status == "stopping":
            reason = Reason(code="stopped", text="stopped on request; " + self._so_far())
            return RunEnded(run=run.id, status="stopped", reason=reason)
        verdict = self._verdict()
        if verdict is not None:
            status, reason, failure = verdict
            return RunEnded(run=run.id, status=status, reason=reason, failure=failure)
        if run.hold:
            return RunPaused(
                run=run.id, reason=Reason(code="paused", text="paused: its trials are saved; " + self._so_far())
            )
        return RunRequeued(
            run=run.id, reason=Reason(code="resumed", text="goes on with its trials where they were saved")
        )

    # Within

    def _wind_down(self) -> list[Intent]:
        run = self.run
        if run.status == "stopping":
            reason = Reason(code="stopping", text="stop was asked for: its trials are left")
            return [*end.leaving(run, "stop", reason, run.live_workers)]
        verdict = self._verdict()
        if verdict is not None:
            return [*end.leaving(run, "release", verdict[1], run.live_workers)]
        if run.status == "pausing":
            return [*end.pause(run)]
        return []

    def _verdict(self) -> Verdict | None:
        """How the study ended, if it has."""
        study = self.study
        if study.failure is not None:
            return "failed", Reason(code=study.failure.code, text=study.failure.message), study.failure
        failed = self._hopeless()
        if failed is not None:
            so_far = self._so_far() if study.ranking else f"no trial has told {study.objectives[0].metric} yet"
            return "failed", Reason(code=failed.code, text=f"{failed.message}; {so_far}"), failed
        if self._spent():
            return "succeeded", self._why_spent(), None
        if study.running or study.waiting or num_new(study):
            return None
        if self._scheduler.otherwise(study, ()) is not None:
            return None
        text = self._so_far() + ("; the space has no further point" if study.exhausted else "")
        counts: dict[str, int | float] = {str(status): count for status, count in study.counts.items()}
        return "succeeded", Reason(code="study-complete", text=text, counts=counts), None

    def _hopeless(self) -> Failure | None:
        """The first failure, where nothing but failures came: of trials, or of workers that never came to a trial.

        A worker that failed by itself would do so again; one that was killed may just have had bad luck."""
        study, run = self.study, self.run
        if not study.ranking and study.failed_in_a_row >= min(MOST_FAILED_IN_A_ROW, study.terms.trials):
            return next(trial.failure for trial in study.trials if trial.failure is not None)
        if any(worker.ready_at_s for worker in run.workers.values()):
            return None
        culprits = exits.culprits(run)
        failed = [worker for worker in culprits if worker.exit is not None and worker.exit.outcome == "failed"]
        if failed:
            return exits.failure_of(run, failed[0], len(failed) - 1)
        dead = exits.dead(run)
        if dead and run.deaths_without_progress >= exits.MAX_DEATHS_WITHOUT_PROGRESS:
            return exits.failure_of(run, dead[-1], run.deaths_without_progress - 1)
        return None

    def _serve(self) -> list[Intent]:
        """A slice for each worker that is free."""
        free = [
            worker for worker in self.run.live_workers
            if worker.status == "ready" and not worker.leaving and worker.index not in self.study.running
            and self._purse.slice_for(worker) is not None
        ]  # fmt: skip
        self.wants = ahead = num_ahead(self.study)
        intents: list[Intent] = []
        taken: set[int] = set()
        while free:
            move = next_move(self.study, self._scheduler, taken)
            if move is None:
                break
            if isinstance(move, Begin):
                drawn = propose(self.study, self.run.id, self.run.spec.seed, min(len(free), move.most or len(free)))
                if drawn is not None:
                    return [*intents, drawn]  # granted in the next round
                self.wants = min(len(free) + ahead, self.study.num_to_propose)
                move = self._scheduler.otherwise(self.study, taken)
                if move is None:
                    break
            if isinstance(move, Clone):
                return [*intents, self._clone(move)]  # granted in the next round
            taken.add(move.trial)
            if isinstance(move, End):
                intents.append(TrialEnded(run=self.run.id, trial=move.trial, status="stopped", reason=move.reason))
                continue
            worker = self._nearest(free, self.study.trials[move.trial])
            prepaid = self._purse.slice_for(worker)
            if prepaid is None:
                break  # what the others just got was the last
            self._purse.grant(worker, prepaid)
            intents.append(self._grant(worker, move, len(taken), prepaid))
        return intents

    def _nearest(self, free: list[Worker], trial: Trial) -> Worker:
        """Takes a free worker: the one that had the trial last, which has it at hand still; else one of the node where
        its state lies."""
        last = trial.grant.worker if trial.grant is not None else None
        worker = min(free, key=lambda one: (one.index != last, one.node != trial.saved_on, one.index))
        free.remove(worker)
        return worker

    def _grant(self, worker: Worker, move: Go, position: int, prepaid: Prepaid) -> SliceGranted:
        trial = self.study.trials[move.trial]
        grant = Grant(
            number=self.study.num_slices + position,
            trial=move.trial,
            worker=worker.index,
            until=move.until,
            state_of=trial.parent if not trial.saved else None,
            prepaid_s=prepaid.prepaid_s,
            paid_s=prepaid.paid_s,
        )
        return SliceGranted(run=self.run.id, attempt=self.run.attempt, grant=grant, reason=move.reason)

    def _clone(self, move: Clone) -> TrialsProposed:
        proposal = Proposal(values=move.values, by="population", parent=move.parent)
        return TrialsProposed(run=self.run.id, first=len(self.study.trials), proposals=(proposal,))

    def _spent(self) -> bool:
        """True once nothing runs and neither a worker that is there nor a new one could be paid for long enough."""
        if not self._purse.limited or self.study.running:
            return False
        staying = [worker for worker in heal.staying(self.run) if worker.devices]
        if any(worker.status != "ready" or self._purse.slice_for(worker) is not None for worker in staying):
            return False
        return not self._purse.num_startable(1)

    def _why_spent(self) -> Reason:
        terms = self.study.terms
        if self._purse.time_over:
            return Reason(code="time-over", text=f"its time of {terms.time} is over: {self._so_far()}")
        text = f"its budget of {terms.budget} is spent, {self.run.cost:.4g} so far: {self._so_far()}"
        return Reason(code="budget-spent", text=text, counts={"cost": self.run.cost, "budget": terms.money or 0.0})

    def _leave_unpaid(self) -> list[Intent]:
        """Since there is a limit, everything is prepaid: whoever began without saves its trial and leaves."""
        unpaid = [worker for worker in heal.staying(self.run) if self._purse.runs_unpaid(worker)]
        reason = Reason(code="limited", text="the study has a limit now: its workers leave, and prepaid ones come")
        ready = [worker for worker in unpaid if worker.status == "ready"]
        rest = [worker for worker in unpaid if worker.status != "ready"]
        return [*end.leaving(self.run, "release", reason, ready), *end.leaving(self.run, "abort", reason, rest)]

    def _leave_nodes(self) -> list[Intent]:
        """Whoever is on a node that is being drained saves its trial and leaves."""
        there = [worker for worker in self.run.live_workers if worker.node in self._draining and not worker.leaving]
        if not there:
            return []
        text = f"{there[0].node} is being drained: its trials are saved and go on elsewhere"
        return [*end.leaving(self.run, "release", Reason(code="moves", text=text), there)]

    def _send_home(self) -> list[Intent]:
        """Workers that have nothing to do, and will not soon, give their devices back; of too many the newest."""
        run, study = self.run, self.study
        staying = [worker for worker in run.live_workers if not worker.leaving]
        idle = [worker for worker in staying if worker.index not in study.running]
        unpaid = [worker for worker in idle if worker.status == "ready" and self._has_to_go(worker)]
        if unpaid:
            text = f"{len(unpaid)} of {len(staying)} workers: what is left of budget and time is too little for them"
            return [*end.leaving(run, "release", Reason(code="unpaid", text=text), unpaid)]
        num_extra = len(staying) - max(self.num_useful, 1)
        extra = sorted(idle, key=lambda worker: worker.index)[len(idle) - num_extra :] if num_extra > 0 else []
        if extra:
            text = f"{len(extra)} of {len(staying)} workers have nothing left to do"
            return [*end.leaving(run, "release", Reason(code="idle", text=text), extra)]
        return self._shrink(staying)

    def _has_to_go(self, worker: Worker) -> bool:
        if not self._purse.limited:
            return False
        until_s = self._purse.paid_until_s(worker)
        self.due += [at_s for at_s in (until_s, self._purse.over_at_s) if self._now_s < at_s < float("inf")]
        return self._purse.slice_for(worker) is None or until_s <= self._now_s

    def _shrink(self, staying: list[Worker]) -> list[Intent]:
        """To what `scale` allows: the newest save their trials and leave."""
        extra = sorted(staying, key=lambda worker: worker.index)[self.run.most :]
        if not extra:
            return []
        text = f"from {len(staying)} to {self.run.most} workers, as asked: the newest save their trials and leave"
        return [*end.leaving(self.run, "release", Reason(code="scaled-down", text=text), extra)]

    def _so_far(self) -> str:
        study = self.study
        best = study.best
        words = f"{len(study.trials)} trial{'' if len(study.trials) == 1 else 's'}"
        if best is not None:
            metric = study.objectives[0].metric
            words += f", the best {metric} {best.metrics[metric]:.6g} of trial {best.number}"
        return words


def next_move(study: Study, scheduler: Scheduler, taken: Collection[int]) -> Move | None:
    """What a free worker does. Trials that were interrupted go first, to where they were to go; then what the scheduler
    finds best; of new ones those that are there already."""
    interrupted = next((n for n in study.waiting if n not in taken and study.trials[n].grant is not None), None)
    if interrupted is not None:
        trial = study.trials[interrupted]
        return Go(trial=trial.number, until=_until(trial), reason=_again(trial))
    move = scheduler.next(study, taken)
    if not isinstance(move, Begin):
        return move
    fresh = next((n for n in study.waiting if n not in taken), None)
    if fresh is not None:
        return Go(trial=fresh, until=move.until, reason=move.reason)
    return move if num_new(study) else scheduler.otherwise(study, taken)


def _until(trial: Trial) -> int:
    assert trial.grant is not None
    return trial.grant.until


def _again(trial: Trial) -> Reason:
    if trial.saved:
        return Reason(code="goes-on", text=f"goes on after {trial.saved} saved rounds")
    return Reason(code="begins-anew", text="begins anew: nothing of it was saved")
