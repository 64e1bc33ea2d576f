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
MAX_PAIRS = 10_000
"""Those tried at all: every pair of up to 141 nodes."""
MAX_TRIED_AT_ONCE = 64
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
        self._trying = asyncio.Semaphore(MAX_TRIED_AT_ONCE)

    async def findings(self) -> list[Finding]:
        """Every pair both ways, as far as the bounds go: first whether there is a way at all, all at once, so that the
        time-outs of those that are not there pass together; then how good it is, round by round."""
        played = list(rounds(len(self._nodes)))[: max(1, MAX_PAIRS // max(1, len(self._nodes) // 2))]
        pairs = [way for one_round in played for one, two in one_round for way in ((one, two), (two, one))]
        tried = dict(zip(pairs, await asyncio.gather(*(self._try(*pair) for pair in pairs)), strict=True))
        measured: list[Way] = []
        for one_round in played[:MEASURED_ROUNDS]:
            found = await asyncio.gather(*(self._pair(one, two, tried) for one, two in one_round))
            measured += [way for both in found for way in both]
        broken = [way for way in tried.values() if way.probe.problem]
        return self._judge(measured, broken, num_tried=len(tried))

    async def _try(self, one: int, two: int) -> Way:
        async with self._trying:
            return await self._probe(self._nodes[one], self._nodes[two], round_trips=1, size_bytes=0)

    async def _pair(self, one: int, two: int, tried: dict[tuple[int, int], Way]) -> list[Way]:
        """One direction after the other."""
        found = []
        for pair in ((one, two), (two, one)):
            if not tried[pair].probe.problem:
                first, second = self._nodes[pair[0]], self._nodes[pair[1]]
                found.append(await self._probe(first, second, round_trips=ROUND_TRIPS, size_bytes=SIZE_BYTES))
        return found

    async def _probe(self, source: Node, target: Node, *, round_trips: int, size_bytes: int) -> Way:
        peer = peer_of(target)
        assert peer is not None
        question = ProbePeer(peer=peer, round_trips=round_trips, size_bytes=size_bytes)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                reply = await self._request(source.id, question)
        except (RacimoError, TimeoutError) as error:
            words = str(error) or f"no end after {PROBE_TIMEOUT_S:g} s"
            reply = ProbeReply(problem=f"{source.host} could not try: {words}")
        assert isinstance(reply, ProbeReply)
        return Way(source, target, reply)

    def _judge(self, measured: list[Way], broken: list[Way], *, num_tried: int) -> list[Finding]:
        broken = broken + [way for way in measured if way.probe.problem]
        good = [way for way in measured if not way.probe.problem]
        findings = [_broken(way) for way in broken]
        if not good:
            return findings
        middle_rate = statistics.median(way.probe.bandwidth_bytes_per_s for way in good)
        middle_s = statistics.median(way.probe.latency_s for way in good)
        for way in good:
            slow = way.probe.bandwidth_bytes_per_s < SLOW_SHARE * middle_rate
            if slow or way.probe.latency_s > max(FAR_FACTOR * middle_s, FAR_LEAST_S):
                findings.append(_slow(way, middle_rate, middle_s))
            elif len(self._nodes) <= LIST_UP_TO:
                findings.append(_good(way))
        if len(self._nodes) > LIST_UP_TO:
            findings.append(self._summary(good, num_tried - len(broken), num_tried))
        return findings

    def _summary(self, good: list[Way], num_there: int, num_tried: int) -> Finding:
        count = len(self._nodes)
        rates = [way.probe.bandwidth_bytes_per_s for way in good]
        round_trips_s = [way.probe.latency_s for way in good]
        words = (
            f"of {count * (count - 1)} ways {num_tried} were tried and {num_there} are there; {len(good)} were"
            f" measured: median {format_size(statistics.median(rates))}/s, least {format_size(min(rates))}/s; round"
            f" trip {statistics.median(round_trips_s) * 1000:.2f} ms, at most {max(round_trips_s) * 1000:.2f} ms"
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
    return f"{format_size(way.probe.bandwidth_bytes_per_s)}/s, round trip {way.probe.latency_s * 1000:.2f} ms"
