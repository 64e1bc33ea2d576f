"""The tree: one order of additions, whoever holds which blocks."""

import itertools
import random

import pytest

from racimo.worker.train.tree import (
    Block,
    Sum,
    Tree,
    assign,
    default_micro_shards,
    evaluate,
    parent,
    share,
    sibling,
    warn_of_default,
)


class Counter:
    """A worker's merging, as the ledger does it, on values that show the order: strings."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.held: dict[Block, str] = {}
        self.most = 0

    def add(self, leaf: int) -> None:
        block, value = self.tree.lift((0, leaf)), str(leaf)
        while (other := sibling(block)) in self.held:
            theirs = self.held.pop(other)
            left, right = (theirs, value) if other[1] < block[1] else (value, theirs)
            block, value = self.tree.lift(parent(block)), f"({left}+{right})"
        self.held[block] = value
        self.most = max(self.most, len(self.held))


def total(tree: Tree, workers: list[Counter]) -> str:
    held = {block: value for worker in workers for block, value in worker.held.items()}
    return evaluate(tree.expression(held), lambda left, right: f"({left}+{right})")


def canonical(tree: Tree) -> str:
    return total(tree, [one_worker(tree, sorted(tree.present))])


def one_worker(tree: Tree, leaves: list[int]) -> Counter:
    counter = Counter(tree)
    for leaf in leaves:
        counter.add(leaf)
    return counter


def test_eight_leaves_are_summed_in_pairs() -> None:
    assert canonical(Tree(8)) == "(((0+1)+(2+3))+((4+5)+(6+7)))"


def test_absent_leaves_are_left_out_without_changing_the_order_of_others() -> None:
    assert canonical(Tree(6)) == "(((0+1)+(2+3))+(4+5))"
    assert canonical(Tree(8, [1, 3, 5, 7])) == "((1+3)+(5+7))"
    assert canonical(Tree(5, [4])) == "4"


@pytest.mark.parametrize("num_leaves", [1, 2, 3, 6, 8, 13, 16])
def test_any_number_of_workers_adds_in_the_same_order(num_leaves: int) -> None:
    tree = Tree(num_leaves)
    for num_workers in range(1, num_leaves + 1):
        workers = [one_worker(tree, leaves) for leaves in share(tree.present, num_workers)]
        assert total(tree, workers) == canonical(tree)


@pytest.mark.parametrize("seed", range(20))
def test_leaves_in_any_hands_and_any_order_are_added_in_the_same_order(seed: int) -> None:
    rng = random.Random(seed)
    num_leaves = rng.randint(1, 32)
    tree = Tree(num_leaves, rng.sample(range(num_leaves), rng.randint(1, num_leaves)))
    workers = [Counter(tree) for _ in range(rng.randint(1, 5))]
    for leaf in rng.sample(sorted(tree.present), len(tree.present)):
        rng.choice(workers).add(leaf)
    assert total(tree, workers) == canonical(tree), seed


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 7])
def test_a_contiguous_range_needs_about_log2_blocks(num_workers: int) -> None:
    tree = Tree(64)
    for leaves in share(tree.present, num_workers):
        assert one_worker(tree, leaves).most <= 2 * 6 - 1


def test_missing_leaves_are_shared_evenly_and_nothing_held_is_redone() -> None:
    tree = Tree(8)
    assignment = assign(tree, [{(1, 0): [0, 1]}, {}, {(0, 7): [7]}])
    assert assignment.kept == (((1, 0),), (), ((0, 7),))
    assert sorted(itertools.chain(*assignment.missing)) == [2, 3, 4, 5, 6]
    assert {len(leaves) for leaves in assignment.missing} == {1, 2}


def test_of_blocks_that_overlap_the_lowest_rank_keeps_its_own() -> None:
    assignment = assign(Tree(4), [{(0, 1): [1]}, {(1, 0): [0, 1]}])
    assert assignment.kept == (((0, 1),), ())
    assert sorted(itertools.chain(*assignment.missing)) == [0, 2, 3]


def test_a_leaf_that_nobody_holds_cannot_be_summed() -> None:
    with pytest.raises(AssertionError, match="micro-shard 1"):
        Tree(2).expression({(0, 0): "a"})


def test_the_default_is_one_for_up_to_four_workers_and_gives_each_of_more_two() -> None:
    assert [default_micro_shards(most) for most in (1, 2, 3, 4, 5, 8, 9)] == [8, 8, 8, 8, 16, 16, 32]


def test_a_default_that_depends_on_the_most_workers_is_said() -> None:
    assert warn_of_default(default_micro_shards(4)) == ""
    assert "for up to 8 workers: a run of at most 4" in warn_of_default(default_micro_shards(5))


def test_an_expression_says_which_operand_comes_first() -> None:
    assert Tree(2).expression({(0, 1): "b", (0, 0): "a"}) == Sum("a", "b")
