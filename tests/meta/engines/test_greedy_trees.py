"""The walk and the cut of engines that bring no verifier."""

import torch

from specverify.backends.adapt.greedy_trees import cut_block, greedy_walk
from specverify.reference.tree import Tree


def test_the_walk_and_the_cut_of_a_block() -> None:
    tree = Tree((0, 0, 0, 2), (5, 1, 2, 3))
    best = torch.eye(8)[torch.tensor([2, 0, 3, 7])]
    assert greedy_walk(tree, best) == ([2, 3], 7)
    assert cut_block([2, 3, 7], 2, set()) == [2, 3]
    assert cut_block([2, 3, 7], 5, {3}) == [2, 3]
