"""Elastic training as the worker side does it, reduced to what the control plane can see: who commits which step."""

import random
from collections.abc import Callable

import msgspec

from racimo.sim.timeline import Timeline
from racimo.sim.worker import SimWorker

CHECKPOINT_EVERY_STEPS = 5

Leave = Callable[[SimWorker, str], None]
Reaches = Callable[[SimWorker, SimWorker], bool]
Counts = Callable[[SimWorker], bool]
"""Whether control takes the worker to be alive."""


class SimWait(msgspec.Struct, frozen=True):
    """What a worker's agent beats: for whom it waits, and whom of them it cannot reach (worker indices)."""

    worker: SimWorker
    waits_for: tuple[int, ...]
    unreachable: tuple[int, ...]


class SimTraining:
    """One run's training over all attempts. `checkpoint` is the step on disk; `commits` all (attempt, step)."""

    def __init__(
        self,
        timeline: Timeline,
        rng: random.Random,
        leave: Leave,
        reaches: Reaches,
        counts: Counts,
        on_hang: Callable[[], None],
        on_hold: Callable[[SimWorker], None],
        config: dict[str, float],
    ) -> None:
        self._timeline, self._rng, self._leave, self._on_hang = timeline, rng, leave, on_hang
        self._on_hold = on_hold
        self._reaches, self._counts = reaches, counts
        self.until, self.step_s = int(config["until"]), float(config["step_s"])
        self.hang_at = int(config.get("hang_at", -1))
        self.checkpoint = 0
        self.commits: list[tuple[int, int]] = []
        self.violations: list[str] = []
        self.workers: list[SimWorker] = []
        self.hung = False
        self._formed: tuple[int, int] = (0, 0)
        self._stuck = False
        """A step that waits for a member whom another does not reach."""
        self._next_step = 1

    @property
    def step(self) -> int:
        return self.commits[-1][1] if self.commits else 0

    def look(self) -> None:
        """Something changed: forms the newest generation if all its members are there and know it."""
        members = self._newest()
        if members is None:
            return
        if self._formed == self._key(members):
            if self._stuck and self._connected(members):
                self._stuck = False
                self._next_commit(members)
            return
        if self._key(members) < self._formed:
            return  # fenced: nothing of an older generation counts any more
        if not self._connected(members):
            return  # it forms once they reach each other, or a newer one does
        self._formed = self._key(members)
        self.hung = self._stuck = False
        held = [member.step for member in members if member.step is not None]
        if not held:
            # Nobody who held the newest step is left: back to the checkpoint, and steps after it are redone.
            self._next_step = self.checkpoint + 1
            attempt = members[0].attempt
            if any(w.alive and w.step is not None and w.attempt == attempt and self._counts(w) for w in self.workers):
                self.violations.append(f"generation {members[0].generation} leaves out the workers that hold the state")
        for member in members:
            member.step = max(held) if held else self.checkpoint
        self._next_commit(members)

    def waits(self) -> list[SimWait]:
        """Members of the newest generation that cannot go on, for want of others."""
        newest = self._newest_key()
        found: list[SimWait] = []
        for worker in self.workers:
            if not self._able(worker) or (worker.attempt, worker.generation) != newest:
                continue
            others = [other for other in self.workers if other.name in worker.members and other is not worker]
            missing = [other for other in others if not other.alive or not self._reaches(worker, other)]
            away = [other for other in missing if not self._reaches(worker, other)]
            if missing:
                found.append(
                    SimWait(worker, tuple(other.index for other in missing), tuple(other.index for other in away))
                )
        return found

    def _able(self, worker: SimWorker) -> bool:
        return worker.alive and worker.ready and not worker.frozen

    def _newest_key(self) -> tuple[int, int]:
        return max(((w.attempt, w.generation) for w in self.workers if self._able(w)), default=(0, 0))

    def _connected(self, members: list[SimWorker]) -> bool:
        return all(self._reaches(one, other) for one in members for other in members)

    def _newest(self) -> list[SimWorker] | None:
        alive = [worker for worker in self.workers if self._able(worker)]
        newest = max(alive, key=lambda worker: (worker.attempt, worker.generation), default=None)
        if newest is None or not newest.members:
            return None
        members = [w for w in alive if w.name in newest.members and w.generation == newest.generation]
        return members if len(members) == len(newest.members) else None

    def _key(self, members: list[SimWorker]) -> tuple[int, int]:
        return members[0].attempt, members[0].generation

    def _next_commit(self, members: list[SimWorker]) -> None:
        key = self._key(members)
        if self.hang_at == (members[0].step or 0):
            self.hung, self.hang_at = True, -1  # the next attempt gets past it
            self._on_hang()
            return
        if (members[0].step or 0) < self.until:
            self._timeline.after(self.step_s * self._rng.uniform(0.5, 1.5), lambda: self._commit(key))
        else:
            for member in members:
                self._timeline.after(self._rng.uniform(0.0, 0.2), lambda m=member: self._leave(m, "finished"))  # type: ignore[misc]

    def _commit(self, key: tuple[int, int]) -> None:
        members = self._newest()
        if members is None or self._key(members) != key or self._formed != key:
            return
        if not self._connected(members):
            self._stuck = True
            return
        step = (members[0].step or 0) + 1
        if step != self._next_step:
            self.violations.append(f"step {step} committed where {self._next_step} was next, in attempt {key[0]}")
        self._next_step = step + 1
        for member in members:
            member.step = step
            if not member.holds:
                member.holds = True
                self._on_hold(member)
        self.commits.append((key[0], step))
        pausing = [member for member in members if member.asked == "pause"]
        if pausing or step == self.until or step % CHECKPOINT_EVERY_STEPS == 0:
            self.checkpoint = step
        for member in pausing:
            self._leave(member, "paused")
        if not pausing:
            self._next_commit(members)
