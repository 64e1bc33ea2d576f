"""The ways between nodes: a tournament in rounds of disjoint pairs, so that no measurement disturbs another's."""

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec

from racimo.agent.protocol import ProbePeer, ProbeReply, ReplyBody, RequestBody
from racimo.control.shipping import peer_of
from racimo.control.views import Finding
from racimo.spec.errors import RacimoError
from racimo.spec.quantity import format_size
from racimo.state.nouns import Node

PROBE_TIMEOUT_S = 15.0
ROUND_TRIPS = 20
SIZE_BYTES = 8_000_000
MEASURED_ROUNDS = 15
"""Rounds with bandwidth; later ones only see whether there is a way, and how long it takes."""
MAX_ROUNDS = 127
LIST_UP_TO = 8
"""Nodes; with more of them only what is wrong is listed pair by pair."""
SLOW_SHARE = 0.33
"""A way with less than this share of the median bandwidth is flagged."""
FAR_FACTOR, FAR_LEAST_S = 10.0, 0.005

Request = Callable[[str, RequestBody], Awaitable[ReplyBody]]


class Way(msgspec.Struct, frozen=True):
    """One direction between two nodes."""

    source: Node
    target: Node
    probe: ProbeReply


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of `count` players in rounds of disjoint pairs (the circle method)."""
    players: list[int | None] = list(range(count))
    if count % 2:
        players.append(None)
    half = len(players) // 2
    for _ in range(len(players) - 1):
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(one, two) for one, two in pairs if one is not None and two is not None]
        players.insert(1, players.pop())


class Ways:
    def __init__(self, request: Request, nodes: Sequence[Node]) -> None:
        self._request, self._nodes = request, nodes
        self._num_tried = 0

    async def findings(self) -> list[Finding]:
        """Both directions of every pair, as far as the bound on rounds goes."""
        ways: list[Way] = []
        for number, pairs in enumerate(rounds(len(self._nodes))):
            if number == MAX_ROUNDS:
                break
            size_bytes = SIZE_BYTES if number < MEASURED_ROUNDS else 0
            found = await asyncio.gather(*(self._pair(one, two, size_bytes) for one, two in pairs))
            ways += [way for both in found for way in both]
        return self._judge(ways)

    async def _pair(self, one: int, two: int, size_bytes: int) -> list[Way]:
        first, second = self._nodes[one], self._nodes[two]
        return [await self._probe(first, second, size_bytes), await self._probe(second, first, size_bytes)]

    async def _probe(self, source: Node, target: Node, size_bytes: int) -> Way:
        peer = peer_of(target)
        assert peer is not None
        question = ProbePeer(peer=peer, round_trips=ROUND_TRIPS if size_bytes else 3, size_bytes=size_bytes)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                reply = await self._request(source.id, question)
        except (RacimoError, TimeoutError) as error:
            words = str(error) or f"no end after {PROBE_TIMEOUT_S:g} s"
            reply = ProbeReply(problem=f"{source.host} could not try: {words}")
        assert isinstance(reply, ProbeReply)
        return Way(source, target, reply)

    def _judge(self, ways: list[Way]) -> list[Finding]:
        if not ways:
            return []
        good = [way for way in ways if not way.probe.problem]
        rates = [way.probe.bandwidth_bytes_per_s for way in good if way.probe.bandwidth_bytes_per_s]
        middle_rate = statistics.median(rates) if rates else 0.0
        middle_s = statistics.median(way.probe.latency_s for way in good) if good else 0.0
        findings = [_broken(way) for way in ways if way.probe.problem]
        for way in good:
            slow = way.probe.bandwidth_bytes_per_s and way.probe.bandwidth_bytes_per_s < SLOW_SHARE * middle_rate
            far = way.probe.latency_s > max(FAR_FACTOR * middle_s, FAR_LEAST_S)
            if slow or far:
                findings.append(_slow(way, middle_rate, middle_s))
            elif len(self._nodes) <= LIST_UP_TO:
                findings.append(_good(way))
        if len(self._nodes) > LIST_UP_TO:
            findings.append(self._summary(good, rates, middle_rate, middle_s))
        return findings

    def _summary(self, good: list[Way], rates: list[float], middle_rate: float, middle_s: float) -> Finding:
        count = len(self._nodes)
        worst_s = max((way.probe.latency_s for way in good), default=0.0)
        words = (
            f"{len(good)} of {count * (count - 1)} ways tried and there, of {len(rates)} the bandwidth: median"
            f" {format_size(middle_rate)}/s, least {format_size(min(rates, default=0.0))}/s;"
            f" round trip {middle_s * 1000:.2f} ms, at most {worst_s * 1000:.2f} ms"
        )
        return Finding(about="ways", verdict="ok", found=words)


def _broken(way: Way) -> Finding:
    source, target = way.source, way.target
    return Finding(
        about="way",
        node=source.id,
        peer=target.id,
        verdict="wrong",
        found=f"{source.host} cannot reach {target.host}: {way.probe.problem}",
        cure=f"let TCP 7701-8799 from {source.address} to {target.address} through every firewall in between, or let"
        f" {target.host} join with --address of an interface that {source.host} reaches",
    )


def _slow(way: Way, middle_rate: float, middle_s: float) -> Finding:
    return Finding(
        about="way",
        node=way.source.id,
        peer=way.target.id,
        verdict="note",
        found=f"{_numbers(way)}; the median of all ways: {format_size(middle_rate)}/s, {middle_s * 1000:.2f} ms",
        cure=f"look at cable, switch port and interface of {way.source.host} and {way.target.host} (ip -s link)",
    )


def _good(way: Way) -> Finding:
    return Finding(about="way", node=way.source.id, peer=way.target.id, verdict="ok", found=_numbers(way))


def _numbers(way: Way) -> str:
    rate = way.probe.bandwidth_bytes_per_s
    words = f"{format_size(rate)}/s, " if rate else ""
    return f"{words}round trip {way.probe.latency_s * 1000:.2f} ms"
