"""The state of the cluster after some record: frozen values in tables, and the tables that follow from them."""

from bisect import insort

import msgspec

from racimo.state.nouns import Node, Run, Worker, worker_id
from racimo.state.study import Kept, Study

SNAPSHOT_VERSION = 1

Pair = tuple[str, str]
"""Two nodes, the smaller id first."""


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    seq: int
    at_s: float
    num_submitted: int
    nodes: list[Node]
    runs: list[Run]
    requests: dict[str, str]
    forgotten: list[str] | dict[str, tuple[str, ...]] = {}
    """A list where only names were kept."""
    stuck: dict[str, str] = {}
    unreachable: list[tuple[str, str, float]] = []
    studies: dict[str, Kept] = {}


class State:
    """Everything that is true after record `seq`. Its values are frozen; `fold.apply` replaces entries in place.

    `nodes`, `runs`, `requests` (idempotency key to run), `forgotten` (dropped runs and their nodes), `stuck` (silent
    node to the worker elsewhere that waits for one on it) and `unreachable` (pairs of nodes that answer but do not
    reach each other, and when that was last seen) are kept in snapshots, `studies` (the trials of tune runs) in part.

    The rest follows from them: `open_runs` (not ended, in order of submission), `leases` (device to worker id),
    `on_node` (node to the ids of its live workers), `capacity` and `free` (node and kind to device indices; `free` only
    of nodes that may get new work).
    """

    def __init__(self) -> None:
        self.seq = 0
        self.at_s = 0.0
        self.num_submitted = 0
        self.nodes: dict[str, Node] = {}
        self.runs: dict[str, Run] = {}
        self.requests: dict[str, str] = {}
        self.forgotten: dict[str, tuple[str, ...]] = {}
        self.stuck: dict[str, str] = {}
        self.unreachable: dict[Pair, float] = {}
        self.studies: dict[str, Study] = {}
        self.open_runs: dict[str, None] = {}
        self.leases: dict[tuple[str, int], str] = {}
        self.on_node: dict[str, dict[str, None]] = {}
        self.capacity: dict[tuple[str, str], tuple[int, ...]] = {}
        self.free: dict[tuple[str, str], list[int]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def worker(self, run: str, attempt: int, index: int) -> Worker | None:
        """The worker by its name, if it belongs to the run's present attempt."""
        found = self.runs.get(run)
        return found.workers.get(index) if found is not None and found.attempt == attempt else None

    # Changes, for the fold

    def put_node(self, node: Node) -> None:
        """A node as it is now, and what follows from it."""
        self._drop_devices(node.id)
        self.nodes[node.id] = node
        kinds: dict[str, list[int]] = {}
        for device in node.devices:
            kinds.setdefault(device.kind, []).append(device.index)
        for kind, indices in kinds.items():
            self.capacity[node.id, kind] = tuple(sorted(indices))
            if placeable(node):
                self.free[node.id, kind] = sorted(i for i in indices if (node.id, i) not in self.leases)

    def drop_node(self, node_id: str) -> None:
        self._drop_devices(node_id)
        del self.nodes[node_id]
        self.stuck.pop(node_id, None)
        self.unreachable = {pair: at_s for pair, at_s in self.unreachable.items() if node_id not in pair}

    def lease(self, run: str, worker: Worker) -> None:
        """The worker's devices are its own."""
        name = worker_id(run, worker.attempt, worker.index)
        self.on_node.setdefault(worker.node, {})[name] = None
        for device in worker.devices:
            self.leases[worker.node, device] = name
            found = self._free_with(worker.node, device)
            if found is not None and device in found:
                found.remove(device)

    def release(self, run: str, worker: Worker) -> None:
        """The worker has ended: its devices are free, where nobody else has them by now."""
        name = worker_id(run, worker.attempt, worker.index)
        there = self.on_node.get(worker.node, {})
        there.pop(name, None)
        if not there:
            self.on_node.pop(worker.node, None)
        for device in worker.devices:
            if self.leases.get((worker.node, device)) != name:
                continue
            heir = self._sharer(run, worker, device)
            if heir is not None:
                self.leases[worker.node, device] = heir
                continue
            del self.leases[worker.node, device]
            found = self._free_with(worker.node, device)
            if found is not None:
                insort(found, device)

    def _sharer(self, run: str, worker: Worker, device: int) -> str | None:
        """The newest other live worker of the run on the same device, where its workers share devices."""
        found = self.runs.get(run)
        for other in reversed(found.live_workers) if found is not None and found.spec.shares > 1 else ():
            if other.index != worker.index and other.node == worker.node and device in other.devices:
                return worker_id(run, other.attempt, other.index)
        return None

    def _drop_devices(self, node_id: str) -> None:
        node = self.nodes.get(node_id)
        for kind in {device.kind for device in node.devices} if node is not None else ():
            del self.capacity[node_id, kind]
            self.free.pop((node_id, kind), None)

    def _free_with(self, node_id: str, index: int) -> list[int] | None:
        """The free devices of the kind of device `index`; None where nothing new is placed or it is not there."""
        node = self.nodes.get(node_id)
        if node is None or not placeable(node):
            return None
        kind = next((device.kind for device in node.devices if device.index == index), None)
        return None if kind is None else self.free[node_id, kind]

    # Snapshots

    def to_bytes(self) -> bytes:
        """The whole state as msgpack, for a snapshot."""
        return msgspec.msgpack.encode(
            _Snapshot(
                version=SNAPSHOT_VERSION,
                seq=self.seq,
                at_s=self.at_s,
                num_submitted=self.num_submitted,
                nodes=list(self.nodes.values()),
                runs=list(self.runs.values()),
                requests=self.requests,
                forgotten=self.forgotten,
                stuck=self.stuck,
                unreachable=[(*pair, at_s) for pair, at_s in self.unreachable.items()],
                studies={run: study.keep() for run, study in self.studies.items()},
            )
        )

    @staticmethod
    def from_bytes(content: bytes) -> "State":
        """The state that `to_bytes` wrote; `ValueError` if it is another version's or not one."""
        snapshot = msgspec.msgpack.decode(content, type=_Snapshot)
        if snapshot.version != SNAPSHOT_VERSION:
            raise ValueError(f"a snapshot of version {snapshot.version}, this is version {SNAPSHOT_VERSION}")
        state = State()
        state.seq, state.at_s, state.num_submitted = snapshot.seq, snapshot.at_s, snapshot.num_submitted
        known = snapshot.forgotten
        state.requests = snapshot.requests
        state.forgotten = known if isinstance(known, dict) else dict.fromkeys(known, ())
        state.stuck = snapshot.stuck
        state.unreachable = {(one, other): at_s for one, other, at_s in snapshot.unreachable}
        state.studies = {run: Study.restored(kept, snapshot.seq) for run, kept in snapshot.studies.items()}
        for node in snapshot.nodes:
            state.put_node(node)
        for run in snapshot.runs:
            state.runs[run.id] = run
            if not run.ended:
                state.open_runs[run.id] = None
            for worker in run.live_workers:
                state.lease(run.id, worker)
        return state


def placeable(node: Node) -> bool:
    """True if it may get new work."""
    return node.status == "up" and not node.draining
