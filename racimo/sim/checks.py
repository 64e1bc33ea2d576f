"""What must hold whatever dies: asserted on the simulated machine's truth and on the journal. And a run's story."""

from collections.abc import Iterable

from racimo.act.journal import MemoryJournal
from racimo.control.core import Core
from racimo.sim.machine import SimMachine
from racimo.sim.worker import SimWorker
from racimo.state.events import Record, WorkerExited
from racimo.state.fold import State, fold
from racimo.state.nouns import worker_id


class Violated(Exception):
    """A promise does not hold; `run` is the run whose story tells how it came."""

    def __init__(self, message: str, run: str = "") -> None:
        super().__init__(message)
        self.run = run


def story(records: Iterable[Record], run: str) -> str:
    """One run's journal, a line per record."""
    lines = []
    for record in records:
        event = record.event
        if getattr(event, "run", "") == run:
            fields = {
                name: getattr(event, name) for name in event.__struct_fields__ if name not in ("run", "spec", "reason")
            }
            reason = getattr(event, "reason", None)
            words = " ".join(f"{name}={value}" for name, value in fields.items())
            lines.append(
                f"{record.seq:5} {record.at_s:10.3f} {type(event).__name__} {words}"
                + (f" -- {reason.text}" if reason is not None else "")
            )
    return "\n".join(lines)


class Watch:
    """Looks at every process that starts and at every commit."""

    def __init__(self, machine: SimMachine) -> None:
        self._machine = machine
        self._started: set[str] = set()
        self.num_starts = 0

    def process_started(self, worker: SimWorker) -> None:
        self.num_starts += 1
        if worker.name in self._started:
            raise Violated(f"{worker.name} was started twice", worker.run)
        self._started.add(worker.name)
        for other in self._machine.alive:
            if other.run == worker.run and other.attempt != worker.attempt:
                raise Violated(f"{other.name} and {worker.name} live at once: two attempts", worker.run)
            if other is not worker and set(other.order.devices) & set(worker.order.devices):
                raise Violated(f"{other.name} and {worker.name} share devices {other.order.devices}", worker.run)
        for other in self._machine.workers.values():
            finished = other.ending is not None and other.ending.outcome == "finished"
            single = other.order.kind == "command" and other.order.world_size == 1
            if other.run == worker.run and other is not worker and finished and single:
                raise Violated(f"{worker.name} repeats {other.name}, which had finished", worker.run)

    def committed(self, core: Core) -> None:
        """After each commit: leases match the live workers, no device beyond the node's, no second live attempt."""
        state = core.state
        held: dict[tuple[str, int], str] = {}
        for run in state.runs.values():
            for worker in run.live_workers:
                if worker.attempt != run.attempt:
                    raise Violated(
                        f"{run.id} is at attempt {run.attempt} and has a live worker of {worker.attempt}", run.id
                    )
                for device in worker.devices:
                    name = worker_id(run.id, worker.attempt, worker.index)
                    if (worker.node, device) in held:
                        raise Violated(f"device {device} is leased to {held[worker.node, device]} and {name}", run.id)
                    held[worker.node, device] = name
        if held != state.leases:
            raise Violated(f"leases {state.leases} but live workers hold {held}")
        devices = {(node.id, device.index) for node in state.nodes.values() for device in node.devices}
        if not set(held) <= devices:
            raise Violated(f"leases of devices that do not exist: {sorted(set(held) - devices)}")


def check_journal(core: Core, disk_journal: MemoryJournal) -> None:
    """The state is the fold of the journal, and a snapshot of it is the same state; each exit is in it once."""
    records = disk_journal.records()
    if fold(records) != core.state:
        raise Violated("the fold of the journal is not the live state")
    if State.from_bytes(core.state.to_bytes()) != core.state:
        raise Violated("the state does not survive a snapshot")
    exited: set[str] = set()
    for record in records:
        if isinstance(record.event, WorkerExited):
            name = worker_id(record.event.run, record.event.attempt, record.event.index)
            if name in exited:
                raise Violated(f"{name} is recorded to have exited twice", record.event.run)
            exited.add(name)
