"""Elastic training as the worker side does it, reduced to what the control plane can see: who commits which step."""

import random
from collections.abc import Callable

from racimo.sim.timeline import Timeline
from racimo.sim.worker import SimWorker

CHECKPOINT_EVERY_STEPS = 5

Leave = Callable[[SimWorker, str], None]


class SimTraining:
    """One run's training over all attempts. `checkpoint` is the step on disk; `commits` all (attempt, step)."""

    def __init__(
        self,
        timeline: Timeline,
        rng: random.Random,
        leave: Leave,
        on_hang: Callable[[], None],
        config: dict[str, float],
    ) -> None:
        self._timeline, self._rng, self._leave, self._on_hang = timeline, rng, leave, on_hang
        self.until, self.step_s = int(config["until"]), float(config["step_s"])
        self.hang_at = int(config.get("hang_at", -1))
        self.checkpoint = 0
        self.commits: list[tuple[int, int]] = []
        self.violations: list[str] = []
        self.workers: list[SimWorker] = []
        self.hung = False
        self._formed: tuple[int, int] = (0, 0)
        self._next_step = 1

    @property
    def step(self) -> int:
        return self.commits[-1][1] if self.commits else 0

    def look(self) -> None:
        """Something changed: forms the newest generation if all its members are there and know it."""
        members = self._newest()
        if members is None or self._formed == self._key(members):
            return
        self._formed = self._key(members)
        self.hung = False
        held = [member.step for member in members if member.step is not None]
        if not held:
            # Nobody who held the newest step is left: back to the checkpoint, and steps after it are redone.
            self._next_step = self.checkpoint + 1
            if any(worker.alive and worker.step is not None for worker in self.workers):
                self.violations.append(f"generation {members[0].generation} leaves out the workers that hold the state")
        for member in members:
            member.step = max(held) if held else self.checkpoint
        self._next_commit(members)

    def _newest(self) -> list[SimWorker] | None:
        alive = [worker for worker in self.workers if worker.alive and worker.ready and not worker.frozen]
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
        step = (members[0].step or 0) + 1
        if step != self._next_step:
            self.violations.append(f"step {step} committed where {self._next_step} was next, in attempt {key[0]}")
        self._next_step = step + 1
        for member in members:
            member.step = step
        self.commits.append((key[0], step))
        pausing = [member for member in members if member.asked == "pause"]
        if pausing or step == self.until or step % CHECKPOINT_EVERY_STEPS == 0:
            self.checkpoint = step
        for member in pausing:
            self._leave(member, "paused")
        if not pausing:
            self._next_commit(members)
