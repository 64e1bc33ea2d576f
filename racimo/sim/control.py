"""The control process in the simulation: the real `Core`, killed at any boundary and started again."""

import random
from collections.abc import Callable, Iterable

from racimo.act.journal import MemoryDisk, MemoryJournal
from racimo.control.core import Core
from racimo.control.effects import Announce, Effect, Forget, Slice, Start, Stop
from racimo.sim.fleet import Fleet
from racimo.sim.machine import AgentDown, SimMachine
from racimo.sim.timeline import Timeline
from racimo.spec.errors import RacimoError
from racimo.state.events import Record

STEP_S = 0.002
SNAPSHOT_EVERY_STEPS = 40
SILENT_AFTER_S = 2.0
PAIR_AFTER_S = 10.0
LOOK_EVERY_S = 0.25
DIAL_MOST_S = 1.0


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


class _Channel:
    """What one control process knows of its connection to one machine."""

    def __init__(self, now_s: float, dials_at_s: float) -> None:
        self.instance = 0
        """Of the agent that it is connected to; 0 for none."""
        self.cursor = 0
        self.quiet_since_s: float | None = now_s
        self.dials_at_s = dials_at_s
        self.in_flight: list[Callable[[], None]] = []
        """Sent into a cable that is out: arrives if that heals before the connection is given up."""


class SimControl:
    """`die_in_boundaries` counts down; at zero the process dies there. `on_commit` is called after each commit."""

    def __init__(self, timeline: Timeline, fleet: Fleet, seed: int) -> None:
        self.timeline, self.fleet, self.seed = timeline, fleet, seed
        self.disk = MemoryDisk()
        self.core: Core | None = None
        self.die_in_boundaries = 0
        self.death_rate = 0.0
        """The chance to die at any boundary, for storms."""
        self.rng = random.Random(seed)
        self.deaths: dict[str, int] = {}
        self.on_death: Callable[[], None] = lambda: None
        self.on_commit: Callable[[Core], None] = lambda core: None
        self._channels: dict[str, _Channel] = {}
        self._pairs: dict[tuple[str, int, int, int], float] = {}
        self._scheduled = False
        self._look_due_s = 0.0
        self._steps = 0

    @property
    def up(self) -> bool:
        return self.core is not None

    def start(self) -> None:
        """Opens the journal; the cluster's clock and the disk are all that is left of an earlier process."""
        if self.core is None:
            self._channels.clear()
            self._pairs.clear()
            self._guard(lambda: self._open())
            self.poke()

    def kill(self, where: str = "idle") -> None:
        if self.core is not None:
            self.core = None
            self.deaths[where] = self.deaths.get(where, 0) + 1
            self.note_contact()
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

    def note_contact(self) -> None:
        """Lets every agent know whether it hears this process, for its leases."""
        for name, machine in self.fleet.machines.items():
            channel = self._channels.get(name)
            talks = channel is not None and channel.instance == machine.instance and self._both_ways(machine)
            machine.set_contact(self.core is not None and talks)

    def _open(self) -> None:
        self.core = Core(_Journal(self.disk, self.boundary), self.timeline)
        self.core.come_up()
        self.core.commit()
        self.on_commit(self.core)

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
        events = [self._talk(machine) for machine in self.fleet.present]
        self._look_for_silence()
        self._look_for_stuck()
        self._settle()
        for channel, newest in events:
            if newest:
                self.boundary("acknowledge")
                channel.cursor = newest
                self.boundary("acknowledged")
                self.poke()
        self._wake_up_later()

    # Connections

    def _talk(self, machine: SimMachine) -> tuple[_Channel, int]:
        """Connects if it can, and takes the agent's news: the cursor to acknowledge once they are durable."""
        assert self.core is not None
        name = machine.node.id
        now_s = self.timeline.now_s()
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = _Channel(now_s, now_s + self._dial_s(name))
        try:
            if self._both_ways(machine) and channel.instance != machine.instance:
                if now_s < channel.dials_at_s:
                    self.timeline.after(channel.dials_at_s - now_s, self.poke)
                    return channel, 0
                channel.instance = channel.cursor = 0
                node, workers = machine.welcome()
                self.core.node_joined(node)
                self.core.resync(name, workers)
                channel.instance, channel.quiet_since_s = machine.instance, None
                machine.set_contact(True)
            if channel.instance and self._both_ways(machine):
                late, channel.in_flight = channel.in_flight, []
                for deliver in late:
                    deliver()
                events = machine.pull(channel.cursor)
                for _, event in events:
                    self.core.agent_event(event)
                return channel, events[-1][0] if events else 0
        except AgentDown:
            self._disconnect(channel, name)
        return channel, 0

    def _dial_s(self, name: str) -> float:
        return 0.0 if name == self.fleet.network.head else self.rng.uniform(0, DIAL_MOST_S)

    def _both_ways(self, machine: SimMachine) -> bool:
        network, name = self.fleet.network, machine.node.id
        return machine.agent_up and network.to_agent(name) and network.from_agent(name)

    def _disconnect(self, channel: _Channel, name: str) -> None:
        now_s = self.timeline.now_s()
        if channel.quiet_since_s is None:
            channel.quiet_since_s = now_s
        channel.instance, channel.in_flight = 0, []
        channel.dials_at_s = now_s + self._dial_s(name)
        self.fleet.machines[name].set_contact(False)

    # What silence and beats say

    def _look_for_silence(self) -> None:
        assert self.core is not None
        now_s = self.timeline.now_s()
        for name, channel in self._channels.items():
            machine = self.fleet.machines[name]
            if machine.agent_up and channel.instance == machine.instance and self.fleet.network.from_agent(name):
                channel.quiet_since_s = None
                continue
            if channel.quiet_since_s is None:
                channel.quiet_since_s = now_s
            if now_s - channel.quiet_since_s >= SILENT_AFTER_S:
                if channel.instance:
                    self._disconnect(channel, name)
                self.core.node_silent(name)
            else:
                self._look_again()
        for name in self.core.state.nodes.keys() - self._channels.keys():
            self.core.node_silent(name)

    def _look_for_stuck(self) -> None:
        assert self.core is not None
        now_s = self.timeline.now_s()
        pairs: dict[tuple[str, int, int, int], float] = {}
        for training in self.fleet.trainings.values():
            for wait in training.waits():
                channel = self._channels.get(wait.worker.node)
                if channel is None or not channel.instance or channel.quiet_since_s is not None:
                    continue
                self._look_again()
                run, attempt, one = wait.worker.run, wait.worker.attempt, wait.worker.index
                for index in wait.waits_for:
                    other = self.core.state.worker(run, attempt, index)
                    if other is not None:
                        self.core.node_stuck(other.node, wait.worker.name)
                for index in wait.unreachable:
                    key = (run, attempt, one, index)
                    pairs[key] = self._pairs.get(key, now_s)
                    if now_s - pairs[key] > PAIR_AFTER_S:
                        self.core.pair_unreachable(run, one, index)
        self._pairs = pairs

    def _look_again(self) -> None:
        """In a moment, once."""
        now_s = self.timeline.now_s()
        if self._look_due_s <= now_s:
            self._look_due_s = now_s + LOOK_EVERY_S
            self.timeline.after(LOOK_EVERY_S, self.poke)

    # Deciding and acting

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
        for effect in effects:
            self.boundary("effect")
            machine, channel = self.fleet.machines.get(effect.node), self._channels.get(effect.node)
            if machine is None or channel is None or channel.instance != machine.instance:
                continue  # what is lost comes again when the agent is back
            deliver = self._delivery(machine, effect)
            if channel.in_flight or not self.fleet.network.to_agent(effect.node):
                channel.in_flight.append(deliver)
                continue
            try:
                deliver()
            except AgentDown:
                self._disconnect(channel, effect.node)
            self.boundary("effected")

    def _delivery(self, machine: SimMachine, effect: Effect) -> Callable[[], None]:
        """The request as it is sent now; it may arrive later."""
        assert self.core is not None
        match effect:
            case Start():
                order = self.core.order_for(effect.worker)
                return lambda: machine.start(order)
            case Announce():
                announcement = effect.message()
                return lambda: machine.announce(announcement)
            case Stop():
                stop = effect.message()
                return lambda: machine.stop(stop)
            case Slice():
                given = effect.message()
                return lambda: machine.run_slice(given)
            case Forget():
                return lambda: None
