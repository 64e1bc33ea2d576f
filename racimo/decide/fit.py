"""What fits where: free devices by node and kind, the placing of workers on them, and what can never fit.

A gang goes to one node if it fits there (the tightest such, so that whole nodes stay for larger gangs), else to as few
as possible; who has workers already gets more of them beside those. Two nodes of which one was seen not to reach the
other share no run while that is news.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache

import msgspec

from racimo.spec.quantity import format_size
from racimo.spec.run import RunSpec
from racimo.spec.study import StudySpec
from racimo.state.fold import State
from racimo.state.nouns import Placement, Reason, Run

PAIR_FRESH_S = 300.0
"""How long nodes that did not reach each other share no run."""

_ANY_STUDY = StudySpec(space={"x": "0.0..1.0"}, metric="loss")

Group = tuple[str, str]
"""A node and a kind of device."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked for: workers with `per_worker` devices of `kind` ("" for any but those in `spare`).

    `shares`: so many workers go on one device. `home`: the nodes that the run has already."""

    kind: str
    per_worker: int
    shares: int = 1
    spare: frozenset[str] = frozenset()
    home: tuple[str, ...] = ()

    def fit_on(self, num_devices: int) -> int:
        """How many workers."""
        return num_devices * self.shares // self.per_worker

    def devices_for(self, num_workers: int) -> int:
        """How many devices so many workers need."""
        return -(-num_workers // self.shares) * self.per_worker

    def wants(self, kind: str) -> bool:
        return kind == self.kind or (not self.kind and kind not in self.spare)


class Pool:
    """Devices by node and kind, as lists of indices in order; taking from it leaves the state alone."""

    def __init__(self, groups: Mapping[Group, Sequence[int]], apart: Iterable[tuple[str, str]] = ()) -> None:
        self._groups = dict(groups)
        self._rooms: dict[tuple[str, int, int], dict[str, int]] = {}
        """By kind asked, size of a worker and workers on a device, how many fit by kind of device."""
        self._apart: dict[str, set[str]] = {}
        for one, other in apart:
            self._apart.setdefault(one, set()).add(other)
            self._apart.setdefault(other, set()).add(one)

    @staticmethod
    def free(state: State, now_s: float, absent: Collection[str] = ()) -> "Pool":
        """Free devices of nodes that may get new work, less those of nodes that are `absent`."""
        groups = {group: found for group, found in state.free.items() if group[0] not in absent}
        return Pool(groups, [pair for pair, at_s in state.unreachable.items() if now_s < at_s + PAIR_FRESH_S])

    @staticmethod
    def whole(state: State, *, answering: bool = False, drained: bool = True, absent: Collection[str] = ()) -> "Pool":
        """All devices, as if nothing ran: of every node, or of those that answer, with or without drained ones."""
        groups = {}
        for group, found in state.capacity.items():
            node = state.nodes[group[0]]
            if answering and (node.status != "up" or node.id in absent):
                continue
            if drained or not node.draining:
                groups[group] = found
        return Pool(groups)

    def offers(self, group: Group) -> bool:
        """Whether such devices may get new work, once they are free."""
        return group in self._groups

    def takes_work(self, node: str) -> bool:
        """Whether the node may get new work."""
        return any(name == node for name, _ in self._groups)

    def plus(self, devices: Mapping[Group, Collection[int]]) -> "Pool":
        """What it would be if these came free, too. Those of nodes that get no new work do not count."""
        more = Pool({group: sorted({*found, *devices.get(group, ())}) for group, found in self._groups.items()})
        more._apart = self._apart
        return more

    def count(self, ask: Ask) -> int:
        """Devices that would do."""
        return self.room(msgspec.structs.replace(ask, per_worker=1, shares=1))

    def largest(self, ask: Ask) -> int:
        """Devices that would do on the one node that has most of them."""
        return max((len(found) for group, found in self._groups.items() if ask.wants(group[1])), default=0)

    def room(self, ask: Ask) -> int:
        """How many workers fit, each with its devices on one node and of one kind; whoever reaches whom."""
        by_kind = self._room(ask)
        return sum(room for kind, room in by_kind.items() if kind not in ask.spare)

    def choose(self, ask: Ask, num_workers: int) -> list[tuple[Group, int]]:
        """How many of up to `num_workers` workers go where. Takes nothing yet."""
        chosen: dict[Group, int] = {}
        used = set(ask.home)
        at_home = [(node, kind) for node in sorted(used) for kind in sorted(self._sizes) if ask.wants(kind)]
        at_home = [group for group in at_home if len(self._groups.get(group, ())) >= ask.per_worker]
        while num_workers > 0:
            group = at_home.pop(0) if at_home else self._best(ask, num_workers, chosen, used)
            if group is None:
                break
            chosen[group] = min(ask.fit_on(len(self._groups[group])), num_workers)
            used.add(group[0])
            num_workers -= chosen[group]
        return list(chosen.items())

    def _best(self, ask: Ask, num_workers: int, chosen: Collection[Group], used: Collection[str]) -> Group | None:
        """The tightest group with room for all, else the largest; none that the nodes in use do not reach."""
        strangers = set().union(*(self._apart.get(node, ()) for node in used)) if self._apart else set()
        ranked: list[tuple[bool, int, int, str]] = []
        for kind, sizes in self._sizes.items():
            for size, nodes in sizes.items():
                room = ask.fit_on(size)
                if room and nodes and ask.wants(kind):
                    whole = room >= num_workers
                    ranked.append((not whole, room if whole else -room, size if whole else -size, kind))
        for _, _, size, kind in sorted(ranked):
            nodes = self._sizes[kind][abs(size)]
            name = min((node for node in nodes if node not in strangers and (node, kind) not in chosen), default=None)
            if name is not None:
                return name, kind
        return None

    def take(self, ask: Ask, chosen: list[tuple[Group, int]], first_index: int) -> tuple[Placement, ...]:
        """Placements for what `choose` found, from the worker's index `first_index` on."""
        placements: list[Placement] = []
        for group, num_workers in chosen:
            found = self._groups[group]
            for number in range(num_workers):
                begin = number // ask.shares * ask.per_worker
                devices = tuple(found[begin : begin + ask.per_worker])
                index = first_index + len(placements)
                placements.append(Placement(index=index, node=group[0], devices=devices))
            left = found[ask.devices_for(num_workers) :]
            for (_, per_worker, shares), by_kind in self._rooms.items():
                if group[1] in by_kind:
                    by_kind[group[1]] += len(left) * shares // per_worker - len(found) * shares // per_worker
            self._sizes[group[1]][len(found)].discard(group[0])
            self._sizes[group[1]].setdefault(len(left), set()).add(group[0])
            self._groups[group] = left
        return tuple(placements)

    @cached_property
    def _sizes(self) -> dict[str, dict[int, set[str]]]:
        """Nodes by kind and number of devices."""
        sizes: dict[str, dict[int, set[str]]] = {}
        for (node, kind), found in self._groups.items():
            sizes.setdefault(kind, {}).setdefault(len(found), set()).add(node)
        return sizes

    def _room(self, ask: Ask) -> dict[str, int]:
        key = (ask.kind, ask.per_worker, ask.shares)
        by_kind = self._rooms.get(key)
        if by_kind is None:
            by_kind = self._rooms[key] = {}
            for (_, kind), found in self._groups.items():
                if ask.kind in ("", kind):
                    by_kind[kind] = by_kind.get(kind, 0) + ask.fit_on(len(found))
        return by_kind


def ask_of(run: Run, spare: frozenset[str] = frozenset()) -> Ask:
    """What the run asks for, beside the workers that it has."""
    kind, per_worker, shares = _demand(run.spec.devices, run.spec.workers)
    home = tuple(dict.fromkeys(worker.node for worker in run.live_workers if not worker.leaving))
    return Ask(kind=kind, per_worker=per_worker, shares=shares, spare=spare, home=home)


def ask_of_spec(spec: RunSpec) -> Ask:
    kind, per_worker, shares = _demand(spec.devices, spec.workers)
    return Ask(kind=kind, per_worker=per_worker, shares=shares)


@lru_cache(maxsize=1024)
def _demand(devices: str, workers: str | int) -> tuple[str, int, int]:
    if "." in devices:  # of trials, which share a device
        shares = RunSpec(tune="any.py:any", study=_ANY_STUDY, devices=devices).shares
        return devices.partition(":")[0].lower(), 1, shares
    spec = RunSpec(train="any", devices=devices, workers=workers)
    return spec.device_demand[0], spec.devices_per_worker, 1


def kind_words(kind: str, count: int) -> str:
    """`2 cpu devices`, `1 device`."""
    return f"{count} {kind + ' ' if kind else ''}device{'' if count == 1 else 's'}"


def can_never_fit(state: State, spec: RunSpec, num_workers: int) -> Reason | None:
    """Why `num_workers` of this spec cannot run even with the cluster all to themselves, or None.

    Nodes that are silent or drained now count, they may come back. Before any node has joined nothing is known to be
    too much.
    """
    if not state.nodes:
        return None
    ask = ask_of_spec(spec)
    if not _has_room(state, ask, num_workers):
        pool = Pool.whole(state)
        total, needed = pool.count(ask), ask.devices_for(num_workers)
        largest = pool.largest(ask)
        counts: dict[str, int | float] = {"asked": needed, "found": total, "largest_node": largest}
        text = f"asked for {kind_words(ask.kind, needed)}"
        if ask.per_worker > 1:
            shape = f" ({num_workers} workers with {ask.per_worker} each on one node)"
            text += " on one node" if num_workers == 1 else shape
        text += f", the whole cluster has {total}"
        if ask.per_worker > largest > 0:
            text += f", and no node has more than {largest}"
        elif total >= needed:
            text += f", at most {largest} on one node"
        return Reason(code="can-never-fit", text=text, counts=counts)
    memory = spec.memory_bytes
    most_memory = max(node.memory_bytes for node in state.nodes.values()) if memory is not None else 0
    if memory is not None and 0 < most_memory < memory:
        text = f"asked for {format_size(memory)} of memory per worker, the largest node has {format_size(most_memory)}"
        return Reason(code="can-never-fit", text=text, counts={"asked": memory, "found": most_memory})
    return None


def _has_room(state: State, ask: Ask, num_workers: int) -> bool:
    for (_, kind), found in state.capacity.items():
        num_workers -= ask.fit_on(len(found)) if ask.wants(kind) else 0
        if num_workers <= 0:
            return True
    return False
