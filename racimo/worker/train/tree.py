"""The one binary tree along which the micro-shards of a step are summed, whoever holds them. Pure.

Floating-point addition is not associative, so equal bits on any number of workers need one order of additions. Leaves
are the micro-shards 0..M-1; `node(level, i) = node(level-1, 2i) + node(level-1, 2i+1)`, and a child without any present
leaf (beyond M, or an empty micro-shard of a short batch) is left out. A *block* `(level, i)` names a node. Whoever
holds both children of a node may add them at once, so a worker with a contiguous range of leaves holds about
log2(M) + 1 blocks at most.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

import msgspec

Block = tuple[int, int]
T = TypeVar("T")

FAST_LEVEL = -1
"""Level of the one block that a worker contributes under `coherence="fast"`; its index is the worker's rank."""
LEAST_DEFAULT = 8
"""Micro-shards per step unless the run may have more than four workers."""


class Sum(msgspec.Struct, Generic[T], frozen=True):
    """`left + right`, in this order."""

    left: "T | Sum[T]"
    right: "T | Sum[T]"


class Tree:
    """The tree over `num_leaves` micro-shards of which only `present` ones hold samples."""

    def __init__(self, num_leaves: int, present: Collection[int] | None = None) -> None:
        assert num_leaves >= 1
        self.num_leaves = num_leaves
        self.present = frozenset(range(num_leaves) if present is None else present)
        self.root: Block = ((num_leaves - 1).bit_length(), 0)
        assert self.present, "a step holds at least one sample"

    def leaves(self, block: Block) -> range:
        level, index = block
        return range(index << level, min((index + 1) << level, self.num_leaves))

    def occupied(self, block: Block) -> bool:
        return any(leaf in self.present for leaf in self.leaves(block))

    def lift(self, block: Block) -> Block:
        """The highest node with the same value: siblings without present leaves add nothing."""
        while block != self.root and not self.occupied(sibling(block)):
            block = parent(block)
        return block

    def expression(self, held: Mapping[Block, T]) -> "T | Sum[T]":
        """How the root is computed from the (lifted, disjoint) blocks that are held."""
        return self._expression(self.root, {self.lift(block): value for block, value in held.items()})

    def _expression(self, block: Block, held: Mapping[Block, T]) -> "T | Sum[T]":
        if block in held:
            return held[block]
        level, index = block
        assert level > 0, f"micro-shard {index} is held by nobody"
        children = [child for child in ((level - 1, 2 * index), (level - 1, 2 * index + 1)) if self.occupied(child)]
        parts = [self._expression(child, held) for child in children]
        return parts[0] if len(parts) == 1 else Sum(parts[0], parts[1])


def sibling(block: Block) -> Block:
    return block[0], block[1] ^ 1


def parent(block: Block) -> Block:
    return block[0] + 1, block[1] >> 1


def chain(values: Sequence[T]) -> "T | Sum[T]":
    """`((a + b) + c) + ...`: the order of `coherence="fast"`."""
    expression: T | Sum[T] = values[0]
    for value in values[1:]:
        expression = Sum(expression, value)
    return expression


def evaluate(expression: "T | Sum[T]", add: Callable[[T, T], T]) -> T:
    if isinstance(expression, Sum):
        return add(evaluate(expression.left, add), evaluate(expression.right, add))
    return expression


def default_micro_shards(most_workers: int) -> int:
    """The smallest power of two that gives each of the most workers two, and at least `LEAST_DEFAULT`: runs of up to
    four workers have one default, thus equal bits."""
    return max(LEAST_DEFAULT, 1 << (2 * most_workers - 1).bit_length())


def warn_of_default(micro_shards: int) -> str:
    """What to say of a default that other runs of the same script, on fewer workers, do not have; "" if all do."""
    if micro_shards <= LEAST_DEFAULT:
        return ""
    return (
        f"{micro_shards} micro-shards, for up to {micro_shards // 2} workers: a run of at most {micro_shards // 4},"
        f" or of more, gives other bits; Batches(..., micro_shards={micro_shards}) fixes it"
    )


def share(leaves: Iterable[int], num_workers: int) -> list[list[int]]:
    """The leaves in order, cut into one contiguous and nearly equal part per rank."""
    ordered = sorted(leaves)
    bounds = [len(ordered) * rank // num_workers for rank in range(num_workers + 1)]
    return [ordered[low:high] for low, high in pairwise(bounds)]


class Assignment(msgspec.Struct, frozen=True):
    """Per rank: the blocks it keeps (others of its blocks are dropped) and the leaves it has to compute."""

    kept: tuple[tuple[Block, ...], ...]
    missing: tuple[tuple[int, ...], ...]


def assign(tree: Tree, holdings: Sequence[Mapping[Block, Collection[int]]]) -> Assignment:
    """Who computes what is still missing, given the leaves inside each rank's blocks. Every member computes the same.

    Blocks that overlap (they cannot, as long as assignments are obeyed) are resolved in favour of the lowest rank.
    """
    taken: set[int] = set()
    kept: list[tuple[Block, ...]] = []
    for blocks in holdings:
        mine = [block for block, leaves in blocks.items() if taken.isdisjoint(leaves)]
        for block in mine:
            taken.update(blocks[block])
        kept.append(tuple(mine))
    missing = share(tree.present - taken, len(holdings))
    return Assignment(tuple(kept), tuple(tuple(leaves) for leaves in missing))
