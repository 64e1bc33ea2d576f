"""All simulated machines, what runs across them, and the cables between them."""

import random
from collections.abc import Callable, Iterator

from racimo.sim.machine import HANG_DETECTION_S, SimMachine
from racimo.sim.network import SimNetwork
from racimo.sim.timeline import Timeline
from racimo.sim.training import SimTraining
from racimo.sim.trials import Truth
from racimo.sim.worker import SimWorker
from racimo.state.nouns import Device, Node


class Fleet:
    """Machines by node id, in order of their coming; the head's is the first. `on_added` is told of each.
    `counts`: whether control takes a worker to be alive."""

    def __init__(self, timeline: Timeline, rng: random.Random) -> None:
        self.timeline, self.rng = timeline, rng
        self.network = SimNetwork(timeline, head="node-1")
        self.machines: dict[str, SimMachine] = {}
        self.trainings: dict[str, SimTraining] = {}
        self.truth = Truth(lambda worker: self.counts(worker))
        self.counts: Callable[[SimWorker], bool] = lambda worker: True
        self.on_added: Callable[[SimMachine], None] = lambda machine: None

    def add(self, num_devices: int) -> SimMachine:
        """A machine that was not there before."""
        name = f"node-{len(self.machines) + 1}"
        devices = tuple(Device(index) for index in range(num_devices))
        node = Node(id=name, host=name, devices=devices, address=f"10.0.0.{len(self.machines) + 1}")
        machine = self.machines[name] = SimMachine(
            self.timeline, self.rng, node, self.training_of, self._saved_at, self.truth
        )
        self.on_added(machine)
        return machine

    @property
    def present(self) -> list[SimMachine]:
        return [machine for machine in self.machines.values() if not machine.gone]

    @property
    def alive(self) -> list[SimWorker]:
        return [worker for machine in self.machines.values() for worker in machine.alive]

    @property
    def workers(self) -> Iterator[SimWorker]:
        """All that ever were."""
        return (worker for machine in self.machines.values() for worker in machine.workers.values())

    def look(self) -> None:
        """Cables changed: steps that were stuck may go on."""
        for training in self.trainings.values():
            training.look()

    def training_of(self, worker: SimWorker) -> SimTraining:
        run = worker.run
        if run not in self.trainings:
            self.trainings[run] = SimTraining(
                self.timeline,
                self.rng,
                self._leave,
                self._reaches,
                lambda worker: self.counts(worker),
                lambda: self._hang_later(run),
                lambda worker: self.machines[worker.node].tell(worker),
                worker.order.config,
            )
        return self.trainings[run]

    def _saved_at(self, node: str, run: str, trial: int) -> int | None:
        machine = self.machines.get(node)
        return None if machine is None or machine.gone else machine.trials.saved.get((run, trial), 0)

    def _leave(self, worker: SimWorker, outcome: str) -> None:
        self.machines[worker.node].leave(worker, outcome)

    def _reaches(self, one: SimWorker, other: SimWorker) -> bool:
        return self.network.reaches(one.node, other.node)

    def _hang_later(self, run: str) -> None:
        self.timeline.after(HANG_DETECTION_S, lambda: self._look_for_hang(run))

    def _look_for_hang(self, run: str) -> None:
        if self.trainings[run].hung:
            for machine in self.machines.values():
                machine.report_hang(run)
            self._hang_later(run)
