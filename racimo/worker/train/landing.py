"""Where the payload behind a packet from another machine goes, and which bytes go behind one to there."""

from collections.abc import Sequence

import torch

from racimo.worker.train.buffers import REDUCED_SLOT, Arena, Layout, raw
from racimo.worker.train.messages import Contribution, Gradient, Holding, Packet, Reduced, Summed
from racimo.worker.train.stream import Broken, Landing, Plan, expect_no_payload


def landing_plan(layout: Layout, arena: Arena, mine: int, theirs: int) -> Plan:
    """For the member of rank `mine`, what comes from rank `theirs`, into the arena that stands for the latter's."""

    def place(packet: Packet, size_bytes: int) -> Landing:
        match packet:
            case Contribution():
                position, count = _position(packet.active, mine)
                return blocks_part(layout, arena, packet.holdings, position, count), None
            case Summed():
                position, count = _position(packet.active, theirs)
                return raw(layout.part(arena.flats(REDUCED_SLOT), position, count)), None
            case Gradient():
                return raw(arena.flats(REDUCED_SLOT)), None
            case Reduced() if packet.num_parts:
                part = new_part(layout, packet.position, packet.num_parts)
                return raw(part), part
            case _:
                return expect_no_payload(packet, size_bytes)

    return place


def blocks_part(
    layout: Layout, arena: Arena, holdings: Sequence[Holding], position: int, num_parts: int
) -> list[memoryview]:
    """The part of each block that the member at this position sums."""
    return [view for holding in holdings for view in raw(layout.part(arena.flats(holding.slot), position, num_parts))]


def new_part(layout: Layout, position: int, num_parts: int) -> list[torch.Tensor]:
    """Private memory for a part of a gradient."""
    bounds = [layout.bounds(section, position, num_parts) for section in layout.sections]
    return [torch.empty(b - a, dtype=s.dtype) for s, (a, b) in zip(layout.sections, bounds, strict=True)]


def _position(active: Sequence[int], rank: int) -> tuple[int, int]:
    if rank not in active:
        raise Broken(f"rank {rank} has no part among {active}")
    return active.index(rank), len(active)
