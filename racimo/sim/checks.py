"""What must hold whatever dies: asserted on the simulated machines' truth and on the journal. And a run's story."""

from collections.abc import Callable, Iterable

from racimo.act.journal import MemoryJournal
from racimo.control.core import Core
from racimo.sim.fleet import Fleet
from racimo.sim.worker import SimWorker
from racimo.state.events import Record, SliceEnded, WorkerExited, WorkersLost
from racimo.state.fold import State, fold
from racimo.state.nouns import Run, parse_worker_id, worker_id
from racimo.state.trials import Result


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
    """Looks at every process that starts and at every commit. `core`: the control process's, None while it is dead."""

    def __init__(self, fleet: Fleet, core: Callable[[], Core | None]) -> None:
        self._fleet, self._core = fleet, core
        self._started: set[str] = set()
        self._held: dict[tuple[str, int], str] = {}
        self._last: Core | None = None
        self.num_starts = 0

    def process_started(self, worker: SimWorker) -> None:
        self.num_starts += 1
        if worker.name in self._started:
            raise Violated(f"{worker.name} was started twice", worker.run)
        self._started.add(worker.name)
        for other in self._fleet.alive:
            if other.run == worker.run and other.attempt != worker.attempt and not self._fenced(other):
                raise Violated(f"{other.name} and {worker.name} live at once: two attempts", worker.run)
            shared = set(other.order.devices) & set(worker.order.devices)
            if other is not worker and other.node == worker.node and shared:
                raise Violated(f"{other.name} and {worker.name} share devices {shared} of {worker.node}", worker.run)
        for other in self._fleet.workers:
            finished = other.ending is not None and other.ending.outcome == "finished"
            single = other.order.kind == "command" and other.order.world_size == 1
            told = "exited" in other.spooled and not self._fleet.machines[other.node].gone
            if other.run == worker.run and other is not worker and finished and single and told:
                raise Violated(f"{worker.name} repeats {other.name}, which had finished", worker.run)

    def _fenced(self, worker: SimWorker) -> bool:
        """A worker of an exact run on a machine that was given up may live on for a while: it commits nothing."""
        core = self._core()
        run = core.state.runs.get(worker.run) if core is not None else None
        if core is None or run is None:
            return worker.ready
        known = core.state.worker(worker.run, worker.attempt, worker.index)
        return (worker.ready or run.micro_shards is not None) and (known is None or not known.live)

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
        for (node_id, device), name in held.items():
            node, new = state.nodes[node_id], self._held.get((node_id, device)) != name
            if new and core is self._last and (node.draining or node.status != "up" or node_id in core.absent):
                raise Violated(f"{name} is placed on {node_id}, which is {node.status}", parse_worker_id(name)[0])
        self._held, self._last = held, core


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


def check_study(core: Core, run: Run, fleet: Fleet, disk_journal: MemoryJournal) -> None:
    """No result is lost or counted twice, none is another's, and no more than a round of a trial was done again."""
    for name, what in fleet.truth.violations:
        if name == run.id:
            raise Violated(what, run.id)
    told: dict[int, Result] = {}
    lost: set[tuple[int, int]] = set()
    for record in disk_journal.records(run.id):
        event = record.event
        if isinstance(event, SliceEnded):
            if event.number in told:
                raise Violated(f"the result of slice {event.number} is recorded twice", run.id)
            told[event.number] = event.result
        elif isinstance(event, WorkersLost):
            lost |= {(event.attempt, index) for index in event.indices}
    for (name, number), (worker, result) in fleet.truth.results.items():
        if name != run.id:
            continue
        if number in told and told[number] != result:
            raise Violated(f"slice {number} came to {result} and is recorded as {told[number]}", run.id)
        given_up = (worker.attempt, worker.index) in lost or fleet.machines[worker.node].gone
        if number not in told and not given_up and run.status != "stopped":
            raise Violated(f"the result of slice {number}, run by {worker.name}, is lost", run.id)
    study = core.state.studies[run.id]
    if run.status == "succeeded" and (study.running or study.waiting):
        raise Violated(f"it succeeded with trials {[*study.running.values(), *study.waiting]} under way", run.id)
