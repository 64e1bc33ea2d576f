"""The control process in the simulation: the real `Core`, killed at any boundary and started again."""

import random
from collections.abc import Callable, Iterable

from racimo.act.journal import MemoryDisk, MemoryJournal
from racimo.control.core import Core
from racimo.control.effects import Announce, Effect, Start, Stop
from racimo.sim.machine import AgentDown, SimMachine
from racimo.sim.timeline import Timeline
from racimo.spec.errors import RacimoError
from racimo.state.events import Record

STEP_S = 0.002
SNAPSHOT_EVERY_STEPS = 40


class ControlKilled(Exception):
    """SIGKILL to the control process at a boundary."""


class _Journal(MemoryJournal):
    def __init__(self, disk: MemoryDisk, boundary: Callable[[str], None]) -> None:
        super().__init__(disk)
        self._boundary = boundary

    def append(self, record: Record) -> None:
        self._boundary("append")
        super().append(record)
        self._boundary("appended")

    def commit(self) -> None:
        self._boundary("commit")
        super().commit()
        self._boundary("committed")


class SimControl:
    """`die_in_boundaries` counts down; at zero the process dies there. `on_commit` is called after each commit."""

    def __init__(self, timeline: Timeline, machine: SimMachine, seed: int) -> None:
        self.timeline, self.machine, self.seed = timeline, machine, seed
        self.disk = MemoryDisk()
        self.core: Core | None = None
        self.die_in_boundaries = 0
        self.death_rate = 0.0
        """The chance to die at any boundary, for storms."""
        self.rng = random.Random(seed)
        self.deaths: dict[str, int] = {}
        self.on_death: Callable[[], None] = lambda: None
        self.on_commit: Callable[[Core], None] = lambda core: None
        self._cursor = 0
        self._connected = 0
        self._scheduled = False
        self._steps = 0

    @property
    def up(self) -> bool:
        return self.core is not None

    def start(self) -> None:
        """Opens the journal; the cluster's clock and the disk are all that is left of an earlier process."""
        if self.core is None:
            self._cursor = self._connected = 0
            self._guard(lambda: self._open())
            self.poke()

    def kill(self, where: str = "idle") -> None:
        if self.core is not None:
            self.core = None
            self.deaths[where] = self.deaths.get(where, 0) + 1
            self.on_death()

    def ask(self, request: Callable[[Core], object]) -> str:
        """A client's call: "ok" or an error's code once it is durable, "" if no answer came."""
        answers: list[str] = []

        def body() -> None:
            assert self.core is not None
            try:
                request(self.core)
                answer = "ok"
            except RacimoError as error:
                answer = error.code
            self._settle()
            answers.append(answer)

        if self.core is not None:
            self._guard(body)
        return answers[0] if answers else ""

    def poke(self) -> None:
        """There may be something to do."""
        if not self._scheduled:
            self._scheduled = True
            self.timeline.after(STEP_S, self._step)

    def boundary(self, where: str) -> None:
        if self.rng.random() < self.death_rate:
            raise ControlKilled(where)
        if self.die_in_boundaries:
            self.die_in_boundaries -= 1
            if not self.die_in_boundaries:
                raise ControlKilled(where)

    def _open(self) -> None:
        self.core = Core(_Journal(self.disk, self.boundary), self.timeline)

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except ControlKilled as killed:
            self.kill(str(killed))

    def _step(self) -> None:
        self._scheduled = False
        if self.core is not None:
            self._guard(self._cycle)

    def _cycle(self) -> None:
        assert self.core is not None
        try:
            if self._connected != self.machine.instance:
                node, workers = self.machine.welcome()
                self.core.node_joined(node)
                self.core.resync(node.id, workers)
                self._connected, self._cursor = self.machine.instance, 0
            events = self.machine.pull(self._cursor)
        except AgentDown:
            self.core.node_silent(self.machine.node.id)
            self._connected, events = 0, []
        for _, event in events:
            self.core.agent_event(event)
        self._settle()
        if events:
            self.boundary("acknowledge")
            self._cursor = events[-1][0]
            self.boundary("acknowledged")
            self.poke()
        self._wake_up_later()

    def _settle(self) -> None:
        assert self.core is not None
        self.core.tick()
        self.core.commit()
        self._steps += 1
        if self._steps % SNAPSHOT_EVERY_STEPS == 0:
            self.core.save_snapshot()
        self.on_commit(self.core)
        self._carry_out(self.core.take_effects())

    def _wake_up_later(self) -> None:
        assert self.core is not None
        if self.core.next_due_s is not None:
            self.timeline.after(self.core.next_due_s - self.timeline.now_s(), self.poke)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        assert self.core is not None
        for effect in effects:
            self.boundary("effect")
            if self._connected != self.machine.instance:
                continue  # what is lost comes again when the agent is back
            try:
                if isinstance(effect, Start):
                    self.machine.start(self.core.order_for(effect.worker))
                elif isinstance(effect, Announce):
                    self.machine.announce(effect.message())
                elif isinstance(effect, Stop):
                    self.machine.stop(effect.message())
            except AgentDown:
                self._connected = 0
            self.boundary("effected")
