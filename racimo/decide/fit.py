"""What fits where: free devices by node and kind, the placing of workers on them, and what can never fit."""

from collections.abc import Container
from functools import lru_cache

from racimo.spec.quantity import format_size
from racimo.spec.run import RunSpec
from racimo.state.fold import State
from racimo.state.nouns import Placement, Reason, Run


class Pool:
    """Devices by node and kind, as lists of indices in order; taking from it leaves the state alone."""

    def __init__(self, groups: dict[tuple[str, str], list[int]]) -> None:
        self.groups = groups

    @staticmethod
    def free(state: State) -> "Pool":
        """The devices of nodes that answer, less those that are leased."""
        return Pool._of(state, set(state.leases), only_up=True)

    @staticmethod
    def whole(state: State, *, only_up: bool) -> "Pool":
        """All devices, as if nothing ran; with those of silent nodes unless `only_up`."""
        return Pool._of(state, set(), only_up=only_up)

    @staticmethod
    def _of(state: State, taken: set[tuple[str, int]], *, only_up: bool) -> "Pool":
        groups: dict[tuple[str, str], list[int]] = {}
        for node in state.nodes.values():
            for device in node.devices:
                if (node.status == "up" or not only_up) and (node.id, device.index) not in taken:
                    groups.setdefault((node.id, device.kind), []).append(device.index)
        return Pool(groups)

    def count(self, kind: str) -> int:
        """Devices of `kind` ("" for any)."""
        return sum(len(found) for (_, has), found in self.groups.items() if kind in ("", has))

    def without(self, kinds: Container[str]) -> "Pool":
        """The same pool, taking from which takes from this one, less the devices of `kinds`."""
        return Pool({group: found for group, found in self.groups.items() if group[1] not in kinds})

    def room(self, kind: str, per_worker: int) -> int:
        """How many workers fit, each with its devices on one node and of one kind."""
        return sum(len(found) // per_worker for (_, has), found in self.groups.items() if kind in ("", has))

    def take(self, kind: str, per_worker: int, num_workers: int, first_index: int) -> tuple[Placement, ...]:
        """Placements for up to `num_workers`, on the nodes with most room first, so that gangs stay together."""
        placements: list[Placement] = []
        order = sorted(self.groups, key=lambda group: (-len(self.groups[group]), group))
        for group in order:
            found = self.groups[group]
            while kind in ("", group[1]) and len(placements) < num_workers and len(found) >= per_worker:
                devices = found[:per_worker]
                del found[:per_worker]
                index = first_index + len(placements)
                placements.append(Placement(index=index, node=group[0], devices=tuple(devices)))
        return tuple(placements)


def demand(run: Run) -> tuple[str, int]:
    """(kind, devices per worker); the kind is "" where any will do."""
    return _demand(run.spec.devices, run.spec.workers)


@lru_cache(maxsize=1024)
def _demand(devices: str, workers: str | int) -> tuple[str, int]:
    spec = RunSpec(train="any", devices=devices, workers=workers)
    return spec.device_demand[0], spec.devices_per_worker


def kind_words(kind: str, count: int) -> str:
    """`2 cpu devices`, `1 device`."""
    return f"{count} {kind + ' ' if kind else ''}device{'' if count == 1 else 's'}"


def can_never_fit(state: State, spec: RunSpec, num_workers: int) -> Reason | None:
    """Why `num_workers` of this spec cannot run even with the cluster all to themselves, or None.

    Nodes that are silent now count, they may come back. Before any node has joined nothing is known to be too much.
    """
    if not state.nodes:
        return None
    kind, per_worker = spec.device_demand[0], spec.devices_per_worker
    pool = Pool.whole(state, only_up=False)
    total, needed = pool.count(kind), num_workers * per_worker
    if pool.room(kind, per_worker) < num_workers:
        largest = max((len(found) for (_, has), found in pool.groups.items() if kind in ("", has)), default=0)
        shape = f" ({num_workers} workers with {per_worker} each on one node)" if per_worker > 1 else ""
        text = f"asked for {kind_words(kind, needed)}{shape}, the whole cluster has {total}"
        if total >= needed:
            text += f", at most {largest} on one node"
        counts: dict[str, int | float] = {"asked": needed, "found": total, "largest_node": largest}
        return Reason(code="can-never-fit", text=text, counts=counts)
    memory = spec.memory_bytes
    most_memory = max(node.memory_bytes for node in state.nodes.values())
    if memory is not None and 0 < most_memory < memory:
        text = f"asked for {format_size(memory)} of memory per worker, the largest node has {format_size(most_memory)}"
        return Reason(code="can-never-fit", text=text, counts={"asked": memory, "found": most_memory})
    return None
