"""Who gives devices back because somebody more important waits.

Elastic runs of a lower priority class do: first all of them shrink towards their `least`, then whole runs save, leave
and queue again by themselves. The lowest class goes first, of equals the newest run (determined#3340). Only a strictly
lower class yields and the queue serves the waiter before those who yielded, so nothing goes round in a circle
(kueue#3779, kueue#2821). Runs that only their user understands are never disturbed.
"""

from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from racimo.decide import end, exits, heal
from racimo.decide.drain import SETTLED_S
from racimo.decide.fit import Ask, Group, Pool, kind_words
from racimo.decide.queue import MAX_NAMED, Waiter
from racimo.spec.run import PRIORITY_ORDER
from racimo.state.events import Intent
from racimo.state.fold import State
from racimo.state.nouns import Reason, Run, Worker


class _Gift(msgspec.Struct, frozen=True):
    """Workers that could go: one that a run can spare, or all of a run (`whole`)."""

    run: Run
    workers: tuple[Worker, ...]
    whole: bool


class Preemption:
    """For one decision, made once everything else is settled. `pool`: what is free; `due`: when to look again."""

    def __init__(self, state: State, pool: Pool, now_s: float) -> None:
        self.intents: list[Intent] = []
        self.due: list[float] = []
        self._state, self._pool, self._now_s = state, pool, now_s
        self._runs = [state.runs[run] for run in state.open_runs]
        self._coming = [worker for run in self._runs for worker in run.live_workers if _comes_free(run, worker)]

    def serve(self, waiter: Waiter, reason: Reason) -> Reason:
        """Lets go what the waiter needs beyond what is free or on its way; never more, and nothing if it would still
        not suffice. The waiter's reason, with what it gets back."""
        lower = self._lower(waiter)
        if not lower and not self._coming:
            return reason
        gifts = [] if self._suffices(waiter, ()) else self._fewest(waiter, lower)
        for run in dict.fromkeys(gift.run.id for gift in gifts):
            self._let_go(waiter, [gift for gift in gifts if gift.run.id == run])
        workers = {gift.run.id: gift.workers for gift in gifts if gift.whole}
        given = [(gift.run.id, w) for gift in gifts for w in gift.workers if gift.whole or gift.run.id not in workers]
        leaving = {(w.node, device) for w in self._coming if self._helps(w, waiter.ask) for device in w.devices}
        leaving |= {(w.node, device) for _, w in given if self._helps(w, waiter.ask) for device in w.devices}
        if not leaving:
            return reason
        holders = list(dict.fromkeys(self._holder(node, device) for node, device in sorted(leaving)))
        names = ", ".join(holders[:MAX_NAMED]) + (" and others" if len(holders) > MAX_NAMED else "")
        text = f"{reason.text}; {names} give{'s' if len(holders) == 1 else ''} {len(leaving)} back"
        return replace(reason, text=text, counts={**reason.counts, "coming": len(leaving)})

    # What there is to be had

    def _fewest(self, waiter: Waiter, lower: list[Run]) -> list[_Gift]:
        """The first gifts in order that suffice together, less those of them that turned out not to be needed."""
        gifts = self._gifts(waiter, lower)
        if not gifts or not self._suffices(waiter, gifts):
            return []
        low, high = 1, len(gifts)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._suffices(waiter, gifts[:middle]) else (middle + 1, high)
        kept = gifts[:low]
        whole = {gift.run.id for gift in kept if gift.whole}
        kept = [gift for gift in kept if gift.whole or gift.run.id not in whole]
        for gift in reversed(kept[:-1]):
            others = [other for other in kept if other is not gift]
            kept = others if self._suffices(waiter, others) else kept
        return kept

    def _lower(self, waiter: Waiter) -> list[Run]:
        """Those that can yield to it, the first to do so first."""
        rank = PRIORITY_ORDER[waiter.run.spec.priority]
        lower = [run for run in self._runs if PRIORITY_ORDER[run.spec.priority] > rank and _can_yield(run)]
        return sorted(lower, key=lambda run: (-PRIORITY_ORDER[run.spec.priority], -run.order))

    def _gifts(self, waiter: Waiter, lower: list[Run]) -> list[_Gift]:
        spare = [_Gift(run, workers, False) for run in lower for workers in self._spare(run, waiter.ask)]
        helping = [run for run in lower if any(self._helps(worker, waiter.ask) for worker in heal.staying(run))]
        return spare + [_Gift(run, tuple(heal.staying(run)), True) for run in helping]

    def _spare(self, run: Run, ask: Ask) -> list[tuple[Worker, ...]]:
        """Those that the run can do without, the newest first; of a tune run's first those that have no trial. Who
        share a device go together: it is free once all of them have left."""
        study = self._state.studies.get(run.id)
        busy = study.running if study is not None else {}
        left = heal.staying(run)
        beside: dict[tuple[str, tuple[int, ...]], list[Worker]] = {}
        for worker in left:
            if self._helps(worker, ask):
                beside.setdefault((worker.node, worker.devices), []).append(worker)
        groups = sorted(
            beside.values(),
            key=lambda group: max((one.status == "ready", one.index in busy, -one.index) for one in group),
        )
        found: list[tuple[Worker, ...]] = []
        num_left = len(left)
        for group in groups:
            if num_left - len(group) >= run.least:
                found.append(tuple(group))
                num_left -= len(group)
        gone = {worker.index for group in found for worker in group}
        left = [worker for worker in left if worker.index not in gone]
        if study is None and not any(exits.holds_state(run, w, self._now_s, SETTLED_S) for w in left):
            self.due += [at_s for w in left if w.ready_at_s and (at_s := w.ready_at_s + SETTLED_S) > self._now_s]
            return []
        return found

    def _suffices(self, waiter: Waiter, gifts: Iterable[_Gift]) -> bool:
        devices: dict[Group, set[int]] = {}
        for worker in self._free_with([*self._coming, *(worker for gift in gifts for worker in gift.workers)]):
            group = self._group(worker)
            if group is not None:
                devices.setdefault(group, set()).update(worker.devices)
        chosen = self._pool.plus(devices).choose(waiter.ask, waiter.num_workers)
        return sum(count for _, count in chosen) >= waiter.num_workers

    def _free_with(self, going: list[Worker]) -> list[Worker]:
        """Of those who go, whose devices are free then: nobody who stays shares them."""
        sharing = [run for run in self._runs if run.spec.shares > 1]
        if not sharing:
            return going
        names = {(worker.node, worker.devices, worker.index) for worker in going}
        live = [(worker.node, worker.devices, worker.index) for run in sharing for worker in run.live_workers]
        shared = {(node, devices) for node, devices, index in live if (node, devices, index) not in names}
        return [worker for worker in going if (worker.node, worker.devices) not in shared]

    def _helps(self, worker: Worker, ask: Ask) -> bool:
        group = self._group(worker)
        return group is not None and ask.wants(group[1]) and self._pool.offers(group)

    def _group(self, worker: Worker) -> Group | None:
        node = self._state.nodes.get(worker.node)
        if node is None or not worker.devices:
            return None
        kind = next((device.kind for device in node.devices if device.index == worker.devices[0]), None)
        return (node.id, kind) if kind is not None else None

    def _holder(self, node: str, device: int) -> str:
        return self._state.leases[node, device].partition("/")[0]

    # What they are told

    def _let_go(self, waiter: Waiter, gifts: Sequence[_Gift]) -> None:
        run = gifts[0].run
        whole = next((gift for gift in gifts if gift.whole), None)
        going = list(whole.workers) if whole is not None else [worker for gift in gifts for worker in gift.workers]
        ready = [worker for worker in going if worker.status == "ready"]
        # Who is not ready yet holds nothing and listens to nobody: it ends at once.
        rest = [worker for worker in going if worker.status != "ready"]
        reason = self._why(waiter, run, len(going), whole is not None)
        self.intents += end.leaving(run, "release" if whole is None else "pause", reason, ready)
        self.intents += end.leaving(run, "abort", reason, rest)

    def _why(self, waiter: Waiter, run: Run, num_going: int, whole: bool) -> Reason:
        stay, needed = len(heal.staying(run)), waiter.ask.devices_for(waiter.num_workers)
        free = self._pool.count(waiter.ask)
        text = f"{waiter.run.id} ({waiter.run.spec.priority} before {run.spec.priority}) needs"
        text += f" {kind_words(waiter.ask.kind, needed)}, {free} free: "
        if whole:
            text += f"its {stay} worker{'' if stay == 1 else 's'} save and leave, and it queues again"
        else:
            text += f"from {stay} to {stay - num_going} workers until there are devices for all"
        counts: dict[str, int | float] = {"needed": needed, "free": free, "from": stay, "to": stay - num_going}
        counts[f"for/{waiter.run.id}"] = needed
        return Reason(code="preempted" if whole else "yields", text=text, counts=counts)


def _can_yield(run: Run) -> bool:
    """Tune runs, whose trials go on where they were saved, and exact training once somebody holds its state."""
    if run.status != "running" or not heal.staying(run):
        return False
    if run.spec.kind == "tune":
        return True
    return run.generation is not None and not end.ending(run) and not exits.finished(run)


def _comes_free(run: Run, worker: Worker) -> bool:
    """True if it is on its way out. What is frozen in place keeps its devices."""
    return bool(worker.leaving) and (worker.leaving != "pause" or run.elastic)
