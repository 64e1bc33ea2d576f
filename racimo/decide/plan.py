"""The one decision: every open run looked at, in order, against the devices that are free."""

from racimo.decide import away, end, heal, retain
from racimo.decide.decision import Decisions
from racimo.decide.fit import Pool
from racimo.decide.queue import Queue, in_order
from racimo.state.events import Intent, RunRequeued, WorkersPlanned
from racimo.state.fold import State
from racimo.state.nouns import Run


def decide(state: State, now_s: float, absent: frozenset[str] = frozenset()) -> Decisions:
    """What is to happen next. Applying the intents and deciding again converges; without news it adds nothing.

    Each intent holds for the state it was made from, and any prefix of them may be all that survives a crash: the next
    decision then makes the rest again. Devices go first to replacements of dead members, then down the queue, and what
    nobody waits for lets elastic runs grow. `now_s` is on the cluster's clock; `absent` are nodes of which this control
    process has heard nothing since it began: nothing new is placed there.
    """
    given_up = away.give_up(state, now_s)
    if given_up:
        return Decisions(intents=tuple(given_up))
    intents: list[Intent] = []
    due: list[float] = []
    pool = Pool.free(state)
    going: list[Run] = []
    queued: list[Run] = []
    for run in in_order([state.runs[run] for run in state.open_runs]):
        if run.status == "queued":
            queued.append(run)
        elif run.live_workers:
            intents += _steer(run, pool, now_s, due, going)
        elif run.status != "paused":
            intents.append(end.close(run))
    if any(isinstance(intent, RunRequeued) for intent in intents):
        # It keeps its place in the queue, which is looked at once it is back in it.
        return Decisions(intents=tuple(intents))
    planned = {intent.run for intent in intents if isinstance(intent, WorkersPlanned)}
    hungry = [run for run in going if run.id not in planned and len(heal.staying(run)) < run.least]
    queue = Queue(state, pool)
    for run in in_order(queued + hungry):
        queue.serve(run)
    intents += queue.intents
    planned |= {intent.run for intent in queue.intents}
    if not queue.anyone_waits:
        for run in going:
            if run.id not in planned and run.generation is not None:
                grown = heal.fill_up(run, pool, heal.target(run), "grows")
                intents += [grown] if grown is not None else []
    intents += retain.forget(state)
    waits = {**queue.waits, **away.waits(state, now_s, due)}
    return Decisions(intents=tuple(intents), waits=waits, next_due_s=min(due, default=None))


def _steer(run: Run, pool: Pool, now_s: float, due: list[float], going: list[Run]) -> list[Intent]:
    """Decisions for a run with live workers; appends it to `going` if it may get more of them now."""
    intents: list[Intent] = list(end.wind_down(run))
    if not end.ending(run):
        intents += [*heal.refuse(run), *heal.release(run)]
        at_s = heal.may_grow_at_s(run)
        if at_s is not None and at_s > now_s:
            due.append(at_s)
        elif at_s is not None:
            replacement = heal.replace_dead(run, pool)
            intents += [replacement] if replacement is not None else []
            going.append(run)
    if not intents or not end.ending(run):
        generation = heal.next_generation(run)
        intents += [generation] if generation is not None else []
    return intents
