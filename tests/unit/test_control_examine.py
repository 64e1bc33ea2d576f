"""`GET /v1/check`: what is wrong on which node and between which, with the cure; quick however many there are."""

import asyncio
import itertools
from typing import Any

import msgspec
import pytest

from racimo.agent.protocol import ListeningPort, ProbePeer, ProbeReply, Usage, UsageReply
from racimo.control import examine_ways
from racimo.control.examine import Examination
from racimo.control.examine_ways import rounds
from racimo.control.views import CheckView, Finding
from racimo.spec.errors import RacimoError
from racimo.state.nouns import Device, Node

VERSIONS = {"racimo": "2.0", "python": "3.11.7", "torch": "2.13.0+cpu"}
NOW_S = 1_800_000_000.0
USAGE = UsageReply(
    processes=(), free_memory_bytes=8 * 10**9, free_disk_bytes=50 * 10**9, total_memory_bytes=16 * 10**9,
    total_disk_bytes=100 * 10**9, wall_s=NOW_S, agent_age_s=90.0,
)  # fmt: skip


def node(number: int, **fields: Any) -> Node:
    base = Node(
        id=f"n{number}", host=f"host{number}", devices=(Device(0), Device(1)), address=f"10.0.0.{number}",
        peer_port=7701, peer_pin="00", versions=VERSIONS,
    )  # fmt: skip
    return msgspec.structs.replace(base, **fields)


class Fleet:
    """Nodes that answer as told. `ways` has what differs from 0.2 ms and 118 MB/s."""

    def __init__(self, *nodes: Node, away: tuple[str, ...] = ()) -> None:
        self.nodes = nodes
        self.away = away
        self.usages: dict[str, UsageReply] = {}
        self.ways: dict[tuple[str, str], ProbeReply] = {}
        self.busy: set[str] = set()
        self.probes: list[tuple[str, str]] = []

    async def request(self, name: str, body: Any) -> Any:
        await asyncio.sleep(0)
        if isinstance(body, Usage):
            if name in self.away:
                raise RacimoError("unreachable", "no answer")
            return self.usages.get(name, USAGE)
        assert isinstance(body, ProbePeer)
        pair = (name, body.peer.node)
        self.probes.append(pair)
        if body.size_bytes:
            assert not self.busy & set(pair), f"{pair} is measured while one of them takes part in another measurement"
            self.busy |= set(pair)
            await asyncio.sleep(0)
            self.busy -= set(pair)
        return self.ways.get(pair, ProbeReply(latency_s=0.0002, bandwidth_bytes_per_s=118e6 if body.size_bytes else 0))

    def check(self) -> CheckView:
        examination = Examination(
            self.request, nodes=self.nodes, connected={one.id for one in self.nodes}, local_node="n1",
            head_versions=VERSIONS, wall_s=lambda: NOW_S,
        )  # fmt: skip
        return asyncio.run(examination.run())


def of(view: CheckView, about: str, name: str, peer: str = "") -> Finding:
    (found,) = [f for f in view.findings if (f.about, f.node, f.peer) == (about, name, peer)]
    return found


def test_a_sound_cluster_has_nothing_to_cure() -> None:
    view = Fleet(node(1), node(2), node(3)).check()
    assert {finding.verdict for finding in view.findings} == {"ok"}
    assert "118 MB/s, round trip 0.20 ms" in of(view, "way", "n2", "n3").found
    assert sum(finding.about == "way" for finding in view.findings) == 6, "both directions of each pair"


def test_a_host_that_cannot_reach_another_is_named_with_it_and_the_ports() -> None:
    fleet = Fleet(node(1), node(2), node(3))
    fleet.ways["n2", "n3"] = ProbeReply(problem="the agent of n3 at 10.0.0.3:7701 cannot be reached: no answer")
    found = of(fleet.check(), "way", "n2", "n3")
    assert found.verdict == "wrong" and "host2 cannot reach host3" in found.found
    assert "TCP 7701-8799 from 10.0.0.2 to 10.0.0.3" in found.cure


def test_a_way_far_slower_than_the_others_is_flagged() -> None:
    fleet = Fleet(node(1), node(2), node(3))
    fleet.ways["n3", "n1"] = ProbeReply(latency_s=0.0002, bandwidth_bytes_per_s=11e6)
    fleet.ways["n1", "n2"] = ProbeReply(latency_s=0.03, bandwidth_bytes_per_s=118e6)
    view = fleet.check()
    assert of(view, "way", "n3", "n1").verdict == "note" and "118 MB/s" in of(view, "way", "n3", "n1").found
    assert of(view, "way", "n1", "n2").verdict == "note" and "30.00 ms" in of(view, "way", "n1", "n2").found
    assert of(view, "way", "n1", "n3").verdict == "ok"


@pytest.mark.parametrize("count", [2, 3, 7, 8])
def test_every_pair_meets_once_in_rounds_of_disjoint_pairs(count: int) -> None:
    played = []
    for pairs in rounds(count):
        assert len({player for pair in pairs for player in pair}) == 2 * len(pairs)
        played += [tuple(sorted(pair)) for pair in pairs]
    assert sorted(played) == list(itertools.combinations(range(count), 2))


def test_many_nodes_are_looked_at_within_bounds_and_in_few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine_ways, "MAX_PAIRS", 100)
    monkeypatch.setattr(examine_ways, "MEASURED_ROUNDS", 2)
    fleet = Fleet(*(node(number) for number in range(1, 41)))
    view = fleet.check()
    assert len(fleet.probes) == 5 * 20 * 2 + 2 * 20 * 2
    (summary,) = [finding for finding in view.findings if finding.about == "ways"]
    assert "of 1560 ways 200 were tried and 200 are there; 80 were measured" in summary.found
    assert not [finding for finding in view.findings if finding.about == "way"]


def test_a_clock_that_is_off_is_said_with_how_much() -> None:
    fleet = Fleet(node(1), node(2), node(3))
    fleet.usages["n2"] = msgspec.structs.replace(USAGE, wall_s=NOW_S - 61)
    fleet.usages["n3"] = msgspec.structs.replace(USAGE, wall_s=NOW_S + 1)
    view = fleet.check()
    assert of(view, "clock", "n2").verdict == "wrong" and "behind the head's clock" in of(view, "clock", "n2").found
    assert "set-ntp" in of(view, "clock", "n2").cure
    assert of(view, "clock", "n3").verdict == "note"


def test_versions_are_held_against_the_heads() -> None:
    patch = {**VERSIONS, "python": "3.11.9"}
    minor = {**VERSIONS, "torch": "2.12.1"}
    view = Fleet(node(1), node(2, versions=patch), node(3, versions=minor)).check()
    assert of(view, "versions", "n2").verdict == "note"
    assert "python 3.11.9 (the head: 3.11.7)" in of(view, "versions", "n2").found
    assert of(view, "versions", "n3").verdict == "wrong" and "2.13" in of(view, "versions", "n3").cure


def test_little_room_and_open_ports_are_said() -> None:
    fleet = Fleet(node(1), node(2))
    ports = (
        ListeningPort("10.0.0.2", 7701, "agent"),
        ListeningPort("0.0.0.0", 10001, "ray raylet"),
        ListeningPort("0.0.0.0", 22),
    )
    fleet.usages["n2"] = msgspec.structs.replace(
        USAGE, free_disk_bytes=10**9, free_memory_bytes=10**8, ports=ports, warnings=("torch is being imported",)
    )
    view = fleet.check()
    assert of(view, "disk", "n2").verdict == "wrong" and of(view, "disk", "n2").cure
    assert of(view, "memory", "n2").verdict == "note"
    found = of(view, "ports", "n2").found
    assert "10.0.0.2:7701 (agent)" in found and "0.0.0.0:10001 (raylet)" in found and "1 of other programs" in found
    assert of(view, "agent", "n1").verdict == "ok"
    assert any(finding.found == "torch is being imported" for finding in view.findings)


def test_a_node_that_does_not_answer_is_said_and_not_measured() -> None:
    fleet = Fleet(node(1), node(2, status="silent"), node(3), node(4, peer_port=0), away=("n2",))
    view = fleet.check()
    assert of(view, "agent", "n2").verdict == "wrong" and "racimo nodes forget n2" in of(view, "agent", "n2").cure
    assert of(view, "address", "n4").verdict == "wrong" and "--address" in of(view, "address", "n4").cure
    assert set(fleet.probes) == {("n1", "n3"), ("n3", "n1")}
