"""The one decision: every open run looked at, in order, against the devices that are free."""

from racimo.decide import end, heal, pairs, retain
from racimo.decide.away import Away
from racimo.decide.decision import Decisions
from racimo.decide.drain import Drain, draining
from racimo.decide.fit import PAIR_FRESH_S, Pool
from racimo.decide.preempt import Preemption
from racimo.decide.queue import Queue, in_order
from racimo.decide.tune.lanes import Lanes
from racimo.state.events import Intent, RunRequeued, WorkersPlanned
from racimo.state.fold import State
from racimo.state.nouns import Node, Run
from racimo.state.study import Study


def decide(state: State, now_s: float, absent: frozenset[str] = frozenset()) -> Decisions:
    """What is to happen next. Applying the intents and deciding again converges; without news it adds nothing.

    Each intent holds for the state it was made from, and any prefix of them may be all that survives a crash: the next
    decision then makes the rest again. Devices go first to replacements of dead members and of those who have to leave
    their node, then down the queue, and what nobody waits for lets elastic runs grow. `now_s` is on the cluster's
    clock; `absent` are nodes that this control process has not heard of since it began: nothing new is placed there.
    """
    away = Away(state, now_s)
    given_up = away.give_up()
    if given_up:
        return Decisions(intents=tuple(given_up))
    steering = _Steering(state, now_s, absent)
    queued: list[Run] = []
    for run in in_order([state.runs[run] for run in state.open_runs]):
        if run.status == "queued":
            if not steering.spent(run):
                queued.append(run)
        elif run.live_workers:
            steering.steer(run)
        elif run.status != "paused":
            steering.intents.append(steering.close(run))
    intents, pool, going = steering.intents, steering.pool, steering.going
    if any(isinstance(intent, RunRequeued) for intent in intents):
        # It keeps its place in the queue, which is looked at once it is back in it.
        return Decisions(intents=tuple(intents))
    planned = {intent.run for intent in intents if isinstance(intent, WorkersPlanned)}
    hungry = [run for run in going if run.id not in planned and len(heal.staying(run)) < run.least]
    queue = Queue(state, pool, absent, steering.waiting)
    for run in in_order(queued + hungry):
        queue.serve(run)
    intents += queue.intents
    planned |= {intent.run for intent in queue.intents}
    if not queue.anyone_waits:
        for run in going:
            if run.id not in planned and run.generation is not None:
                grown = heal.fill_up(run, pool, heal.target(run), "grows")
                intents += [grown] if grown is not None else []
        for lanes in steering.lanes:
            intents += lanes.grow(pool)
    intents += retain.forget(state)
    if not intents and queue.anyone_waits:
        preemption = Preemption(state, pool, now_s)
        for waiter in queue.waiters:
            queue.waits[waiter.run.id] = preemption.serve(waiter, queue.waits[waiter.run.id])
        intents += preemption.intents
        steering.due += preemption.due
    due = steering.due + ([away.due_s] if away.due_s is not None else [])
    due += [at_s + PAIR_FRESH_S for at_s in state.unreachable.values() if now_s < at_s + PAIR_FRESH_S]
    due += [at_s for lanes in steering.lanes for at_s in lanes.due]
    wants = {lanes.run.id: lanes.wants for lanes in steering.lanes if lanes.wants}
    return Decisions(intents=tuple(intents), waits=queue.waits, next_due_s=min(due, default=None), wants=wants)


class _Steering:
    """Decisions for runs with live workers; `going` are those that may get more of them now."""

    def __init__(self, state: State, now_s: float, absent: frozenset[str]) -> None:
        self.intents: list[Intent] = []
        self.due: list[float] = []
        self.going: list[Run] = []
        self.lanes: list[Lanes] = []
        """Of tune runs with workers."""
        self.waiting: dict[str, Lanes] = {}
        """Of tune runs in the queue."""
        self.pool = Pool.free(state, now_s, absent)
        self._state = state
        self._now_s = now_s
        self._draining: dict[str, Node] = draining(state)

    def close(self, run: Run) -> Intent:
        """For a run whose workers have all ended."""
        study = self._state.studies.get(run.id)
        return end.close(run) if study is None else self._lanes(run, study).close()

    def spent(self, run: Run) -> bool:
        """For a run in the queue: whether it has no money or time left, and so ends where it is."""
        study = self._state.studies.get(run.id)
        if study is None:
            return False
        lanes = self.waiting[run.id] = self._lanes(run, study)
        if lanes.num_startable:
            return False
        self.intents.append(lanes.close())
        return True

    def _lanes(self, run: Run, study: Study) -> Lanes:
        return Lanes(run, study, self._now_s, self._draining, self._state.nodes)

    def steer(self, run: Run) -> None:
        study = self._state.studies.get(run.id)
        if study is not None:
            lanes = self._lanes(run, study)
            self.intents += lanes.steer()
            self.lanes.append(lanes)
            return
        moves = bool(self._draining) and any(worker.node in self._draining for worker in run.live_workers)
        if _steady(run) and not moves:
            return
        intents: list[Intent] = list(end.wind_down(run))
        drain = Drain(run, self._draining, self._now_s)
        if not intents and run.status != "stopping" and run.failure is None and moves:
            intents += drain.steer(self.due)
        if not intents:
            intents += pairs.part(self._state, run, self._now_s)
        moved = bool(intents)
        if not end.ending(run):
            intents += heal.refuse(run)
            if not drain.num_replaced:
                intents += heal.release(run, drain.evicted)
            self._grow(run, drain, intents)
        if not intents or not (moved or end.ending(run)):
            generation = heal.next_generation(run)
            intents += [generation] if generation is not None else []
        self.intents += intents

    def _grow(self, run: Run, drain: Drain, intents: list[Intent]) -> None:
        at_s = heal.may_grow_at_s(run)
        if at_s is None:
            return
        if at_s > self._now_s:
            self.due.append(at_s)
            return
        planned = heal.replace_dead(run, self.pool)
        if planned is None and drain.evicted and run.generation is not None and not intents:
            planned = heal.replace_evicted(run, self.pool, drain.evicted, drain.num_wanted())
            num_short = drain.num_wanted() - (0 if planned is None else len(planned.placements))
            intents += drain.shrink(num_short, self.due)
        intents += [planned] if planned is not None else []
        self.going.append(run)


def _steady(run: Run) -> bool:
    """True for the many runs that go on as they are: nothing to end, to announce or to add."""
    if run.status != "running" or run.failure is not None or run.unreachable:
        return False
    members = run.generation.members if run.generation is not None else ()
    for worker in run.workers.values():
        if worker.exit is not None or worker.leaving or (run.elastic and worker.status != "ready"):
            return False
    if not run.elastic:
        return True
    return len(members) == len(run.workers) == heal.target(run)
