"""Which relays there should be, by what Ray says of its nodes: a pure comparison.

A relay's name says its node and what it holds, so two lists of names are all there is to compare, and nothing is
remembered: `relay/NODE/CPU=2,GPU=1`. The relay of a node with a Ray part of ours follows it through restarts (it asks
for the node's own resource); one on a node that came through Ray alone is bound to Ray's id of it.
"""

from collections.abc import Container, Iterable, Mapping

import msgspec

from racimo.act.ray.place import NODE_RESOURCE

DEVICE_RESOURCES = ("CPU", "GPU", "TPU", "HPU", "NPU", "neuron_cores")
RELAY_KEPT_S = 60.0
"""How long the relay of a node that Ray has lost waits for its return; after that a new one is made when it comes."""


MAKE_AGAIN_FIRST_S = 1.0
MAKE_AGAIN_MOST_S = 60.0


class RayNode(msgspec.Struct, frozen=True, kw_only=True):
    """A living node as Ray lists it. `own`: our id of it, "" if it came through Ray alone."""

    ray_id: str
    own: str
    held: tuple[tuple[str, float], ...]

    @property
    def name(self) -> str:
        return self.own or f"ray-{self.ray_id[:12]}"

    @property
    def relay(self) -> str:
        return f"relay/{self.name}/" + ",".join(f"{kind}={amount:g}" for kind, amount in self.held)


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver says to the keeper: relays by node, each `up` or what is wrong."""

    relays: dict[str, str]


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    create: tuple[RayNode, ...]
    remove: tuple[str, ...]


class Makings:
    """When a relay may be made again: at once, then after 1 s, 2 s ... `MAKE_AGAIN_MOST_S`. One that dies while it is
    made (Racimo is missing there) would cost that node a Python process each second."""

    def __init__(self) -> None:
        self._next: dict[str, tuple[float, float]] = {}

    def may(self, relay: str, now_s: float) -> bool:
        """Whether it is time; if so, that counts as a try."""
        due_s, delay_s = self._next.get(relay, (0.0, MAKE_AGAIN_FIRST_S))
        if now_s < due_s:
            return False
        # A relay that lived for long begins anew.
        delay_s = MAKE_AGAIN_FIRST_S if now_s - due_s > MAKE_AGAIN_MOST_S else delay_s
        self._next[relay] = (now_s + delay_s, min(delay_s * 2, MAKE_AGAIN_MOST_S))
        return True

    def keep(self, relays: Container[str]) -> None:
        """Forgets all others."""
        self._next = {relay: known for relay, known in self._next.items() if relay in relays}


def living_nodes(listed: Iterable[Mapping[str, object]]) -> dict[str, RayNode]:
    """By the name of their relays, from `ray.nodes()`. A node's former part, of which Ray does not know yet that it is
    dead, counts as the same node."""
    found: dict[str, RayNode] = {}
    for entry in listed:
        resources = entry.get("Resources")
        if not entry.get("Alive") or not isinstance(resources, dict):
            continue
        own = next((kind.removeprefix(NODE_RESOURCE) for kind in resources if kind.startswith(NODE_RESOURCE)), "")
        held = tuple((kind, float(resources[kind])) for kind in DEVICE_RESOURCES if resources.get(kind))
        node = RayNode(ray_id=str(entry["NodeID"]), own=own, held=held)
        found[node.relay] = node
    return found


def node_of(relay: str) -> str:
    return relay.split("/")[1]


def compare(nodes: Mapping[str, RayNode], relays: Iterable[str], unseen_s: Mapping[str, float]) -> Changes:
    """`relays`: names of those that exist. `unseen_s`: for how long each has been without its node."""
    existing = set(relays)
    living = {node.name for node in nodes.values()}
    remove = []
    for relay in sorted(existing - nodes.keys()):
        bound = node_of(relay).startswith("ray-")
        # Its node is here with other devices, is gone for good (Ray gives no id twice), or has been away for long.
        if node_of(relay) in living or bound or unseen_s.get(relay, 0.0) > RELAY_KEPT_S:
            remove.append(relay)
    create = [node for name, node in sorted(nodes.items()) if name not in existing]
    return Changes(create=tuple(create), remove=tuple(remove))
