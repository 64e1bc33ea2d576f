"""Who gets free devices next: priority, then first come; gangs whole; nobody overtakes the first who waits."""

import msgspec

from racimo.decide import heal
from racimo.decide.fit import Pool, demand, kind_words
from racimo.spec.run import PRIORITY_ORDER
from racimo.state.events import AttemptPlanned, WorkersPlanned
from racimo.state.fold import State
from racimo.state.nouns import Reason, Run, parse_worker_id

MAX_HOLDERS_NAMED = 5


class _Blocked(msgspec.Struct, frozen=True):
    run: Run
    words: str


class Queue:
    """One walk through everybody who asks for devices: `intents` are what they get, `waits` why the others do not."""

    def __init__(self, state: State, pool: Pool) -> None:
        self.intents: list[AttemptPlanned | WorkersPlanned] = []
        self.waits: dict[str, Reason] = {}
        self._state = state
        self._pool = pool
        self._all = Pool.whole(state, only_up=True)
        self._blocked: dict[str, _Blocked] = {}
        self._holders = _holders(state)
        self._num_ahead = 0

    @property
    def anyone_waits(self) -> bool:
        """True if somebody waits whom free devices could help."""
        return bool(self._blocked)

    def serve(self, run: Run) -> None:
        """Next in order, `run` gets a new attempt (queued) or the workers it lacks to its `least` (running)."""
        kind, per_worker = demand(run)
        # Who is content with any kind leaves those kinds alone for which somebody ahead waits.
        open_to_it = self._pool.without(self._blocked)
        ahead = self._blocked.get(kind) or self._blocked.get("")
        if ahead is not None:
            self.waits[run.id] = self._behind(ahead)
        elif run.status == "running":
            self._fill(run, open_to_it)
        elif open_to_it.room(kind, per_worker) >= run.least:
            self._begin(run, open_to_it)
        else:
            self._wait(run, run.least, open_to_it)
        self._num_ahead += run.id in self.waits

    def _begin(self, run: Run, pool: Pool) -> None:
        kind, per_worker = demand(run)
        most = heal.target(run)
        placements = pool.take(kind, per_worker, most, 0)
        devices = len(placements) * per_worker
        text = f"starts with {len(placements)} of {run.least}..{most} workers" if run.least < most else "starts"
        text += f" on {kind_words(kind, devices)}"
        if run.attempt:
            text += f", attempt {run.attempt + 1}"
        counts: dict[str, int | float] = {
            "workers": len(placements),
            "least": run.least,
            "most": most,
            "devices": devices,
        }
        reason = Reason(code="starts", text=text, counts=counts)
        self.intents.append(AttemptPlanned(run=run.id, attempt=run.attempt + 1, placements=placements, reason=reason))

    def _fill(self, run: Run, pool: Pool) -> None:
        lacking = run.least - len(heal.staying(run))
        planned = heal.fill_up(run, pool, run.least, "fills-up")
        if planned is not None:
            self.intents.append(planned)
            lacking -= len(planned.placements)
        if lacking > 0:
            self._wait(run, lacking, pool)

    def _wait(self, run: Run, num_workers: int, pool: Pool) -> None:
        kind, per_worker = demand(run)
        needed, free, total = num_workers * per_worker, pool.count(kind), self._all.count(kind)
        counts: dict[str, int | float] = {"needed": needed, "free": free, "total": total}
        if self._all.room(kind, per_worker) < run.least:
            text = f"needs {kind_words(kind, run.least * per_worker)}, the nodes that answer have {total}"
            self.waits[run.id] = Reason(code="waits-nodes", text=text, counts=counts)
            return  # no device that comes free could help it, so it is in nobody's way
        words = f"needs {kind_words(kind, needed)}{' more' if run.status == 'running' else ''}, {free} of {total} free"
        text = words
        holders = [(holder, count) for holder, count in self._holders.items() if holder != run.id]
        if holders:
            text += "; " + ", ".join(f"{holder} holds {count}" for holder, count in holders[:MAX_HOLDERS_NAMED])
            counts |= {f"blocked_by/{holder}": count for holder, count in holders[:MAX_HOLDERS_NAMED]}
        if len(holders) > MAX_HOLDERS_NAMED:
            text += f" and {len(holders) - MAX_HOLDERS_NAMED} more runs hold some"
        self.waits[run.id] = Reason(code="waits-devices", text=text, counts=counts)
        self._blocked.setdefault(kind, _Blocked(run, words))

    def _behind(self, ahead: _Blocked) -> Reason:
        others = f", {self._num_ahead} ahead of it in all" if self._num_ahead > 1 else ""
        text = f"waits for its turn behind {ahead.run.id}, which {ahead.words}{others}"
        return Reason(code="waits-turn", text=text, counts={"ahead": self._num_ahead, f"blocked_by/{ahead.run.id}": 1})


def in_order(runs: list[Run]) -> list[Run]:
    """Priority class, then order of submission."""
    return sorted(runs, key=lambda run: (PRIORITY_ORDER[run.spec.priority], run.order))


def _holders(state: State) -> dict[str, int]:
    held: dict[str, int] = {}
    for worker in state.leases.values():
        run = parse_worker_id(worker)[0]
        held[run] = held.get(run, 0) + 1
    return dict(sorted(held.items(), key=lambda item: -item[1]))
