"""Who gets free devices next: priority, then first come; gangs whole; nobody overtakes the first who waits."""

from collections.abc import Collection, Mapping
from functools import cached_property

import msgspec

from racimo.decide import heal
from racimo.decide.fit import Ask, Group, Pool, ask_of, kind_words
from racimo.decide.tune.lanes import Lanes
from racimo.spec.run import PRIORITY_ORDER
from racimo.state.events import AttemptPlanned, WorkersLeaving, WorkersPlanned
from racimo.state.fold import State
from racimo.state.nouns import Reason, Run

MAX_NAMED = 5


class Waiter(msgspec.Struct, frozen=True):
    """The first who waits for devices of its kind, and for how many workers."""

    run: Run
    words: str
    num_workers: int
    ask: Ask


class Queue:
    """One walk through everybody who asks for devices: `intents` are what they get, `waits` why the others do not."""

    def __init__(
        self, state: State, pool: Pool, absent: Collection[str], lanes: Mapping[str, Lanes] | None = None
    ) -> None:
        self.intents: list[AttemptPlanned | WorkersPlanned | WorkersLeaving] = []
        self.waits: dict[str, Reason] = {}
        self._state = state
        self._pool = pool
        self._absent = absent
        self._lanes = lanes or {}
        """Of tune runs that wait: they know with how many workers they may begin."""
        self._blocked: dict[str, Waiter] = {}
        self._num_ahead = 0

    @property
    def anyone_waits(self) -> bool:
        """True if somebody waits whom free devices could help."""
        return bool(self._blocked)

    @property
    def waiters(self) -> list[Waiter]:
        """Those who are first in line, at most one for each kind of device."""
        return list(self._blocked.values())

    def serve(self, run: Run) -> None:
        """Next in order, `run` gets a new attempt (queued) or the workers it lacks to its `least` (running)."""
        # Who is content with any kind leaves those kinds alone for which somebody ahead waits.
        ask = ask_of(run, frozenset(self._blocked))
        ahead = self._blocked.get(ask.kind) or self._blocked.get("")
        if run.status == "running" and run.generation is None:
            self._complete(run)
        elif ahead is not None:
            self.waits[run.id] = self._behind(ahead)
        elif run.status == "running":
            self._fill(run, ask)
        else:
            chosen = self._pool.choose(ask, self._most(run)) if self._pool.room(ask) >= run.least else []
            if sum(count for _, count in chosen) >= run.least:
                self._begin(run, ask, chosen)
            else:
                self._wait(run, run.least, ask)
        self._num_ahead += run.id in self.waits

    def _most(self, run: Run) -> int:
        lanes = self._lanes.get(run.id)
        return heal.target(run) if lanes is None else lanes.num_startable

    def _begin(self, run: Run, ask: Ask, chosen: list[tuple[Group, int]]) -> None:
        most, lanes = self._most(run), self._lanes.get(run.id)
        placements = self._pool.take(ask, chosen, 0)
        placements = placements if lanes is None else lanes.pay(placements)
        devices, nodes = ask.devices_for(len(placements)), len({group[0] for group, _ in chosen})
        text = f"starts with {len(placements)} of {run.least}..{most} workers" if run.least < most else "starts"
        text += f" on {kind_words(ask.kind, devices)}" + (f" of {nodes} nodes" if nodes > 1 else "")
        if run.attempt:
            text += f", attempt {run.attempt + 1}"
        counts: dict[str, int | float] = {
            "workers": len(placements),
            "least": run.least,
            "most": most,
            "devices": devices,
        }
        counts |= {"nodes": nodes} if nodes > 1 else {}
        reason = Reason(code="starts", text=text, counts=counts)
        self.intents.append(AttemptPlanned(run=run.id, attempt=run.attempt + 1, placements=placements, reason=reason))

    def _fill(self, run: Run, ask: Ask) -> None:
        lacking = run.least - len(heal.staying(run))
        planned = heal.fill_up(run, self._pool, run.least, "fills-up", ask.spare)
        if planned is not None:
            self.intents.append(planned)
            lacking -= len(planned.placements)
        if lacking > 0:
            self._wait(run, lacking, ask)

    def _complete(self, run: Run) -> None:
        """A gang of which some died before it could begin: whole again at once, whoever waits, or all over from its
        place in the queue. Two that kept what they have and waited for the rest could wait for each other for ever."""
        num_lacking = run.least - len(heal.staying(run))
        if sum(count for _, count in self._pool.choose(ask_of(run), num_lacking)) >= num_lacking:
            planned = heal.fill_up(run, self._pool, run.least, "fills-up")
            self.intents += [planned] if planned is not None else []
            return
        live = [worker.index for worker in run.live_workers if worker.leaving != "abort"]
        text = f"{len(heal.staying(run))} of its {run.least} workers are left before it began, and devices for the rest"
        reason = Reason(code="begins-anew", text=f"{text} are not free: it queues for all of them again")
        if live:
            self.intents.append(
                WorkersLeaving(run=run.id, attempt=run.attempt, indices=tuple(live), how="abort", reason=reason)
            )

    def _wait(self, run: Run, num_workers: int, ask: Ask) -> None:
        needed, free = ask.devices_for(num_workers), self._pool.count(ask)
        plain = msgspec.structs.replace(ask, spare=frozenset())
        total = self._usable.count(plain)
        counts: dict[str, int | float] = {"needed": needed, "free": free, "total": total}
        if self._usable.room(plain) < run.least:
            self.waits[run.id] = self._for_nodes(run, plain, counts)
            return  # no device that comes free could help it, so it is in nobody's way
        more = " more" if run.status == "running" else ""
        words = f"needs {kind_words(ask.kind, needed)}{more}, {free} of {total} free"
        code = "waits-devices"
        if self._pool.room(ask) >= num_workers:
            code = "waits-pair"
            words += f", but not on nodes that reach each other ({self._pairs()})"
        elif free >= needed:
            code = "waits-one-node"
            words += f", at most {self._pool.largest(ask)} on one node where each worker needs {ask.per_worker}"
        text, holders = words, [(holder, count) for holder, count in self._holders.items() if holder != run.id]
        if holders:
            text += "; " + ", ".join(f"{holder} holds {count}" for holder, count in holders[:MAX_NAMED])
            counts |= {f"blocked_by/{holder}": count for holder, count in holders[:MAX_NAMED]}
        if len(holders) > MAX_NAMED:
            text += f" and {len(holders) - MAX_NAMED} more runs hold some"
        self.waits[run.id] = Reason(code=code, text=text, counts=counts)
        if code != "waits-pair":
            self._blocked.setdefault(ask.kind, Waiter(run, words, num_workers, ask))

    def _for_nodes(self, run: Run, ask: Ask, counts: dict[str, int | float]) -> Reason:
        """Waits for machines, not for others' work: for drained ones where those that answer would do."""
        needs, total = kind_words(ask.kind, ask.devices_for(run.least)), counts["total"]
        if ask.per_worker > 1:
            needs += f" ({ask.per_worker} on one node for each worker)"
        if self._answering.room(ask) >= run.least:
            text = f"needs {needs}, the nodes that are not being drained have {total} ({self._drained} drained)"
            return Reason(code="waits-drained", text=text, counts=counts)
        text = f"needs {needs}, the nodes that answer have {total}{self._away}"
        return Reason(code="waits-nodes", text=text, counts=counts)

    def _behind(self, ahead: Waiter) -> Reason:
        others = f", {self._num_ahead} ahead of it in all" if self._num_ahead > 1 else ""
        text = f"waits for its turn behind {ahead.run.id}, which {ahead.words}{others}"
        return Reason(code="waits-turn", text=text, counts={"ahead": self._num_ahead, f"blocked_by/{ahead.run.id}": 1})

    @cached_property
    def _usable(self) -> Pool:
        """All devices of nodes that may get new work, as if nothing ran."""
        return Pool.whole(self._state, answering=True, drained=False, absent=self._absent)

    @cached_property
    def _answering(self) -> Pool:
        return Pool.whole(self._state, answering=True, absent=self._absent)

    @cached_property
    def _drained(self) -> str:
        return _names([node.id for node in self._state.nodes.values() if node.draining and node.status == "up"])

    @cached_property
    def _away(self) -> str:
        away = [n.id for n in self._state.nodes.values() if n.status != "up" or n.id in self._absent]
        return f" ({_names(away)} {'does' if len(away) == 1 else 'do'} not answer)" if away else ""

    @cached_property
    def _holders(self) -> dict[str, int]:
        """Runs by the number of devices that they hold, most first."""
        held = {
            run.id: sum(len(worker.devices) for worker in run.live_workers)
            for run in (self._state.runs[run_id] for run_id in self._state.open_runs)
        }
        return dict(sorted(((run, count) for run, count in held.items() if count), key=lambda item: -item[1]))

    def _pairs(self) -> str:
        return ", ".join(f"{one} and {other} do not" for one, other in list(self._state.unreachable)[-MAX_NAMED:])


def in_order(runs: list[Run]) -> list[Run]:
    """Priority class, then order of submission."""
    return sorted(runs, key=lambda run: (PRIORITY_ORDER[run.spec.priority], run.order))


def _names(nodes: list[str]) -> str:
    named = ", ".join(nodes[:MAX_NAMED])
    return named + (f" and {len(nodes) - MAX_NAMED} more" if len(nodes) > MAX_NAMED else "")
