"""Looks at every node of the cluster and at the ways between them: what is wrong, and what to do about it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec

from racimo.act.versions import SAME_MINOR, minor_of
from racimo.agent.protocol import ReplyBody, RequestBody, Usage, UsageReply
from racimo.control.examine_ways import Ways
from racimo.control.shipping import peer_of
from racimo.control.views import CheckView, Finding
from racimo.spec.errors import RacimoError
from racimo.spec.quantity import format_duration, format_size
from racimo.state.nouns import Node

ASK_TIMEOUT_S = 5.0
MAX_ASKED_AT_ONCE = 64
LOW_DISK_BYTES = 2 * 10**9
LOW_MEMORY_BYTES = 10**9
CLOCK_NOTE_S = 0.5
CLOCK_WRONG_S = 5.0
"""Durations are never taken from two clocks; but certificates, logs and people compare them."""
NAMED_PORTS = 12

Request = Callable[[str, RequestBody], Awaitable[ReplyBody]]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself. `ahead_s`: its clock against the head's, known to `exact_to_s`."""

    usage: UsageReply
    ahead_s: float
    exact_to_s: float


class Examination:
    """`request` asks a node's agent; `connected` are those that can be asked; `head_versions` are the control process's
    own; `local_node` is the node of its machine."""

    def __init__(
        self, request: Request, *, nodes: Sequence[Node], connected: Collection[str], local_node: str,
        head_versions: dict[str, str], wall_s: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._request, self._nodes, self._connected = request, nodes, connected
        self._local_node, self._head_versions, self._wall_s = local_node, head_versions, wall_s
        self._asking = asyncio.Semaphore(MAX_ASKED_AT_ONCE)

    async def run(self) -> CheckView:
        """Seconds in all, however many nodes there are: what there is no time for is said."""
        began_s = time.monotonic()
        answers = await asyncio.gather(*(self._ask(node) for node in self._nodes))
        findings = [
            finding
            for node, answer in zip(self._nodes, answers, strict=True)
            for finding in self._of_node(node, answer)
        ]
        reachable = [
            node
            for node, answer in zip(self._nodes, answers, strict=True)
            if isinstance(answer, Answer) and peer_of(node)
        ]
        findings += await Ways(self._request, reachable).findings()
        return CheckView(findings=tuple(findings), took_s=time.monotonic() - began_s)

    async def _ask(self, node: Node) -> Answer | str:
        """Or why it does not answer."""
        if node.id not in self._connected:
            return "its agent is not linked"
        async with self._asking:
            before_s = self._wall_s()
            try:
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    reply = await self._request(node.id, Usage(ports=True))
            except (RacimoError, TimeoutError) as error:
                return str(error) or f"its agent has not answered within {ASK_TIMEOUT_S:g} s"
            after_s = self._wall_s()
        assert isinstance(reply, UsageReply)
        # The answer is made at its end: the question's way there and the measuring lie before it.
        return Answer(usage=reply, ahead_s=reply.wall_s - (before_s + after_s) / 2, exact_to_s=(after_s - before_s) / 2)

    def _of_node(self, node: Node, answer: Answer | str) -> list[Finding]:
        if isinstance(answer, str):
            return [_silent(node, answer)]
        usage = answer.usage
        found = [_here(node, usage), self._versions(node), *_room(node, usage), _ports(node, usage)]
        if node.id != self._local_node:
            found.append(_clock(node, answer))
            if not node.peer_port:
                found.append(_serves_nobody(node))
        found += [Finding(about="agent", node=node.id, verdict="note", found=words) for words in usage.warnings]
        return found

    def _versions(self, node: Node) -> Finding:
        theirs = {name: node.versions.get(name, "none") for name in ("racimo", *SAME_MINOR)}
        head = {name: self._head_versions.get(name, "none") for name in theirs}
        words = ", ".join(f"{name} {version}" for name, version in theirs.items())
        other = [name for name in theirs if theirs[name] != head[name]]
        if not other:
            return Finding(about="versions", node=node.id, verdict="ok", found=words)
        differences = ", ".join(f"{name} {theirs[name]} (the head: {head[name]})" for name in other)
        grave = [name for name in other if name in SAME_MINOR and minor_of(theirs[name]) != minor_of(head[name])]
        cure = f"on {node.host}: racimo down && pip install racimo=={head['racimo']} && racimo join"
        if grave:
            name = grave[0]
            cure = f"on {node.host}: a {name} of {minor_of(head[name])}, as the head has"
        elif "racimo" not in other:
            cure = ""
        return Finding(
            about="versions", node=node.id, verdict="wrong" if grave else "note", found=differences, cure=cure
        )


def _silent(node: Node, why: str) -> Finding:
    reason = f" ({node.reason.text})" if node.reason is not None else ""
    return Finding(
        about="agent",
        node=node.id,
        verdict="wrong",
        found=f"{node.host} is {node.status}{reason}: {why}",
        cure=f"on {node.host}: racimo check; or, if it is gone for good: racimo nodes forget {node.id} --confirm-dead",
    )


def _here(node: Node, usage: UsageReply) -> Finding:
    kinds = sorted({device.kind for device in node.devices})
    counts = [f"{sum(device.kind == kind for device in node.devices)} {kind}" for kind in kinds]
    names = sorted({device.name for device in node.devices if device.name})
    where = f" at {node.address}" if node.address else ""
    devices = f"{', '.join(counts) or 'no'} devices{f' ({names[0]})' if names else ''}"
    words = f"{node.host}{where}, {devices}, agent up for {format_duration(usage.agent_age_s)}"
    if node.draining:
        cure = f"racimo drain {node.id} --undo   # gives it work again"
        return Finding(about="agent", node=node.id, verdict="note", found=f"{words}; it is being drained", cure=cure)
    return Finding(about="agent", node=node.id, verdict="ok", found=words)


def _room(node: Node, usage: UsageReply) -> list[Finding]:
    disk = f"{format_size(usage.free_disk_bytes)} of {format_size(usage.total_disk_bytes)} free"
    memory = f"{format_size(usage.free_memory_bytes)} of {format_size(usage.total_memory_bytes)} available"
    low_disk, low_memory = usage.free_disk_bytes < LOW_DISK_BYTES, usage.free_memory_bytes < LOW_MEMORY_BYTES
    cure = f"make room on {node.host}, or let it join with RACIMO_HOME on a larger disk"
    few = "training workers take some 300 MB each with torch; end what is not needed"
    return [
        Finding(
            about="disk", node=node.id, verdict="wrong" if low_disk else "ok", found=disk, cure=cure if low_disk else ""
        ),
        Finding(
            about="memory", node=node.id, verdict="note" if low_memory else "ok", found=memory,
            cure=few if low_memory else "",
        ),
    ]  # fmt: skip


def _clock(node: Node, answer: Answer) -> Finding:
    off_s = abs(answer.ahead_s)
    way = "ahead of" if answer.ahead_s > 0 else "behind"
    exact = f"known to {max(answer.exact_to_s * 1000, 1):.0f} ms"
    if off_s <= CLOCK_NOTE_S + answer.exact_to_s:
        return Finding(
            about="clock", node=node.id, verdict="ok", found=f"{off_s * 1000:.0f} ms off the head's, {exact}"
        )
    return Finding(
        about="clock",
        node=node.id,
        verdict="wrong" if off_s > CLOCK_WRONG_S else "note",
        found=f"{format_duration(off_s)} {way} the head's clock, {exact}",
        cure=f"on {node.host}: timedatectl set-ntp true",
    )


def _ports(node: Node, usage: UsageReply) -> Finding:
    """What stands open to other machines."""
    ours = [
        f"{port.address}:{port.port} ({port.owner})" for port in usage.ports if port.owner and not _is_ray(port.owner)
    ]
    rays = [f"{port.address}:{port.port} ({port.owner[4:]})" for port in usage.ports if _is_ray(port.owner)]
    others = sum(not port.owner for port in usage.ports)
    words = [f"open to other machines: {_some(ours)}" if ours else "none of ours is open to other machines"]
    if rays:
        words.append(f"of Ray: {_some(rays)}")
    if others:
        words.append(f"and {others} of other programs")
    return Finding(
        about="ports",
        node=node.id,
        verdict="note" if rays else "ok",
        found="; ".join(words),
        cure="Ray's ports need its token but are not encrypted: a firewall should keep them among the nodes"
        if rays
        else "",
    )


def _some(places: list[str]) -> str:
    more = len(places) - NAMED_PORTS
    return ", ".join(places[:NAMED_PORTS]) + (f" and {more} more" if more > 0 else "")


def _is_ray(owner: str) -> bool:
    return owner.startswith("ray ")


def _serves_nobody(node: Node) -> Finding:
    where = node.address or "an unknown address"
    return Finding(
        about="address",
        node=node.id,
        verdict="wrong",
        found=f"{node.host} cannot be reached by other nodes: its agent could not listen at {where}",
        cure=f"on {node.host}: ip -br address; then racimo join with --address of an interface that the others reach",
    )
