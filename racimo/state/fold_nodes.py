"""What happens to machines, as a part of the fold: they join, fall silent, are lost, drained and forgotten."""

from typing import assert_never

from msgspec.structs import replace

from racimo.state import events as ev
from racimo.state.nouns import Node, Reason
from racimo.state.state import State

MAX_UNREACHABLE_PAIRS = 1_000
"""So many findings about pairs of nodes are remembered, the newest."""

NodeEvent = (
    ev.NodeJoined | ev.NodeSilent | ev.NodeStuck | ev.NodeLost | ev.NodeForgotten | ev.DrainRequested
)  # fmt: skip


def apply(state: State, event: NodeEvent, at_s: float) -> None:
    """Lets one event about a node happen to `state`, in place."""
    if isinstance(event, ev.NodeJoined):
        _join(state, event.node)
        return
    node = state.nodes.get(event.node)
    if node is None:
        return
    match event:
        case ev.NodeSilent():
            if node.status == "lost":
                state.put_node(replace(node, silent_at_s=at_s))
            else:
                reason = Reason(code="node-silent", text=f"{node.id} does not answer")
                state.put_node(replace(node, status="silent", silent_at_s=at_s, reason=reason))
        case ev.NodeStuck():
            if node.status == "silent":
                state.stuck[node.id] = event.witness
        case ev.NodeLost():
            state.put_node(replace(node, status="lost", reason=event.reason))
        case ev.NodeForgotten():
            state.drop_node(node.id)
        case ev.DrainRequested():
            state.put_node(_undrained(node) if event.undo else _drained(node, event, at_s))
            settle_drain(state, node.id)
        case _:
            assert_never(event)


def _join(state: State, node: Node) -> None:
    """It is there; whether it is being drained is not its own to say."""
    known = state.nodes.get(node.id)
    state.stuck.pop(node.id, None)
    state.put_node(node)
    if known is not None and known.draining:
        deadline_s, begun_s = known.drain_deadline_s, known.drain_at_s
        back = replace(node, draining=True, drain_deadline_s=deadline_s, drain_at_s=begun_s, reason=_draining(node.id))
        state.put_node(back)
        settle_drain(state, node.id)


def settle_drain(state: State, node_id: str) -> None:
    """Says so where the last worker has left a node that is being drained."""
    node = state.nodes.get(node_id)
    if node is not None and node.draining and node.status == "up" and node_id not in state.on_node:
        state.put_node(replace(node, reason=Reason(code="drained", text=f"{node_id} is drained: nothing runs there")))


def note_unreachable(state: State, one: str, other: str, at_s: float) -> None:
    pair = (min(one, other), max(one, other))
    kept = [entry for entry in state.unreachable.items() if entry[0] != pair]
    state.unreachable = {**dict(kept[1 - MAX_UNREACHABLE_PAIRS :]), pair: at_s}


def _drained(node: Node, event: ev.DrainRequested, at_s: float) -> Node:
    deadline_s = None if event.deadline_s is None else at_s + event.deadline_s
    reason = _draining(node.id) if node.status == "up" else node.reason
    begun_s = node.drain_at_s if node.draining else at_s
    return replace(node, draining=True, drain_deadline_s=deadline_s, drain_at_s=begun_s, reason=reason)


def _draining(node_id: str) -> Reason:
    text = f"{node_id} is being drained: it gets nothing new, and what runs there moves or ends"
    return Reason(code="draining", text=text)


def _undrained(node: Node) -> Node:
    reason = None if node.status == "up" else node.reason
    return replace(node, draining=False, drain_deadline_s=None, drain_at_s=0.0, reason=reason)
