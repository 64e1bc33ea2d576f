"""What befalls the simulated cluster: deaths of processes and machines, cables that break, machines that come."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from racimo.sim.machine import SimMachine

if TYPE_CHECKING:
    from racimo.sim.world import World

STRIKES_END_S = 60.0
LOOK_AT_DRAIN_EVERY_S = 1.0


class Fate:
    """Strikes at random, from the world's seed. `num_faults` counts the strikes by kind."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._rng, self._fleet, self._control = world.rng, world.fleet, world.control
        self.num_faults: dict[str, int] = {}
        self.num_drains = 0
        self.leaving: set[str] = set()
        """Nodes that are drained for good."""

    def plan(self, only: tuple[str, ...] = ()) -> None:
        """Strikes of all kinds, or of those named."""
        kinds: dict[str, tuple[int, Callable[[], None]]] = {
            "control": (2, self._control.kill),
            "control at a boundary": (6, self._kill_at_boundary),
            "storm": (1, self._storm),
            "agent": (2, lambda: self._machine().kill_agent()),
            "agent in a request": (3, self._kill_in_request),
            "zygote": (1, self._kill_zygote),
            "supervisor": (1, self._kill_supervisor),
            "worker": (5, self._kill_worker),
        }
        if len(self._fleet.machines) > 1:
            kinds |= {
                "host cut": (4, self._cut_host),
                "link cut": (3, self._cut_link),
                "pair cut": (2, self._cut_pair),
                "reboot": (1, lambda: self._power_off(self._machine())),
                "machine lost": (2, self._lose_machine),
                "drain": (2, self._drain),
                "join": (1, lambda: self._join(self._rng.choice((1, 2, 4)))),
            }
        kinds = {kind: found for kind, found in kinds.items() if not only or kind in only}
        weights = [weight for weight, _ in kinds.values()]
        for _ in range(self._rng.randint(3, 25)):
            kind = self._rng.choices(tuple(kinds), weights)[0]
            self._later(self._rng.uniform(0, STRIKES_END_S), lambda k=kind: self._strike(k, kinds[k][1]))  # type: ignore[misc]

    def _strike(self, kind: str, action: Callable[[], None]) -> None:
        self.num_faults[kind] = self.num_faults.get(kind, 0) + 1
        action()

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._world.timeline.after(delay_s, action)

    def _machine(self) -> SimMachine:
        return self._rng.choice(self._fleet.present)

    # Processes

    def _kill_at_boundary(self) -> None:
        self._control.die_in_boundaries = self._rng.randint(1, 40)

    def _storm(self) -> None:
        """For a while every boundary may be the last, those of the recovery itself included."""
        self._control.death_rate = 0.05
        self._later(self._rng.uniform(1, 20), self._calm)

    def _calm(self) -> None:
        self._control.death_rate = 0.0

    def _kill_in_request(self) -> None:
        self._machine().die_in_requests = self._rng.randint(1, 20)

    def _kill_zygote(self) -> None:
        machine = self._machine()
        machine.zygote_up = False
        self._later(self._rng.uniform(0.1, 2.0), machine.start_zygote)

    def _kill_supervisor(self) -> None:
        """Its guardian starts it again; until then nothing else comes back."""
        self._world.supervisor_back_s = self._world.timeline.now_s() + self._rng.uniform(0.5, 4.0)

    def _kill_worker(self) -> None:
        alive = self._fleet.alive
        if alive:
            worker = self._rng.choice(alive)
            self._world.disturbed.add(worker.run)
            self._fleet.machines[worker.node].kill_worker(worker)

    # Cables

    def _cut_host(self) -> None:
        """Its cable is out for a while: black-holed, no reset comes. It may be the head's."""
        machine = self._machine()
        self._fleet.network.cut_host(machine.node.id)
        self._later(self._rng.uniform(0.5, 40), lambda: self._fleet.network.heal(machine.node.id))

    def _cut_link(self) -> None:
        """Only head and agent do not hear each other, or only one of them; the workers do."""
        machine = self._machine()
        self._fleet.network.cut_link(machine.node.id, self._rng.choice(("both", "to agent", "from agent")))
        self._later(self._rng.uniform(0.5, 40), lambda: self._fleet.network.heal(machine.node.id))

    def _cut_pair(self) -> None:
        present = self._fleet.present
        if len(present) < 2:
            return
        one, other = (machine.node.id for machine in self._rng.sample(present, 2))
        self._fleet.network.cut_pair(one, other)
        self._later(self._rng.uniform(5, 60), lambda: self._fleet.network.heal_pair(one, other))

    # Machines

    def _power_off(self, machine: SimMachine) -> None:
        self._world.disturbed.update(worker.run for worker in machine.alive)
        machine.reboot()

    def _lose_machine(self) -> None:
        """Burnt, with its disk. Somebody says so after a while, or nobody does; another is bought."""
        others = [machine for machine in self._fleet.present if machine.node.id != self._fleet.network.head]
        if not others:
            return
        machine = self._rng.choice(others)
        # What had been ordered there counts too: it may have begun, for all that anybody can know.
        self._world.disturbed.update(worker.run for worker in machine.workers.values())
        self._destroy(machine, vouched=self._rng.random() < 0.5)

    def _destroy(self, machine: SimMachine, *, vouched: bool) -> None:
        machine.destroy()
        self._fleet.network.heal(machine.node.id)
        self._fleet.look()
        self._control.poke()
        self._later(self._rng.uniform(1, 30), lambda: self._join(len(machine.node.devices)))
        if vouched:
            name, delay_s = machine.node.id, self._rng.uniform(3, 60)
            self._world.keep_asking(delay_s, f"forget-{name}", lambda core: core.forget_node(name, confirm_dead=True))

    def _join(self, num_devices: int) -> None:
        self._fleet.add(num_devices)

    def _drain(self) -> None:
        """Undone after a while, or the machine leaves once it is empty."""
        machine, deadline_s = self._machine(), self._rng.choice((None, 3.0, 20.0))
        name, self.num_drains = machine.node.id, self.num_drains + 1
        leaves = name != self._fleet.network.head and self._rng.random() < 0.3
        if leaves:
            deadline_s = deadline_s or 20.0
        number = self.num_drains

        def goes_on() -> None:
            if leaves:
                self.leaving.add(name)
                self._world.num_pending += 1
                self._look_at_drain(machine)
            else:
                delay_s = self._rng.uniform(1, 40)
                self._world.keep_asking(delay_s, f"undo-{number}", lambda core: core.drain(name, undo=True))

        self._world.keep_asking(0.0, f"drain-{number}", lambda core: core.drain(name, deadline_s), goes_on)

    def _look_at_drain(self, machine: SimMachine) -> None:
        core = self._control.core
        node = core.state.nodes.get(machine.node.id) if core is not None else None
        over = machine.gone or (node is not None and not node.draining)
        if not over and (node is None or node.reason is None or node.reason.code != "drained" or machine.alive):
            self._later(LOOK_AT_DRAIN_EVERY_S, lambda: self._look_at_drain(machine))
            return
        self._world.num_pending -= 1
        self.leaving.discard(machine.node.id)
        if not over:
            self._destroy(machine, vouched=True)
