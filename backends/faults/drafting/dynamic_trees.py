"""Faults in the growth of a dynamic tree: path scores, frontier and rerank."""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.seams import Seams
from specverify.backends.engine.tree_growth import TreeGrowth
from specverify.backends.faults.fault import drafted_fault, in_place_of


@drafted_fault(
    "rerank-breaks-parents-first",
    "SafeAILab/EAGLE, topK_genrate: the kept candidates are sorted by index, so that parents come first",
    "a dynamic tree of two levels",
)
@in_place_of("trees.rerank")
def parents_not_first(trees: TreeGrowth, scores: Tensor, parents: list[int], most: int) -> list[int]:
    """The kept candidates are not sorted by number after the rerank: children stand before their parents.

    They stay in the order of an ascending sort by score, where a child comes before its likelier parent.
    """
    return sorted(trees.rerank(scores, parents, most), key=scores.tolist().__getitem__)


class OwnScores(TreeGrowth):
    """The growth of a tree by the score of each candidate alone."""

    def cumulate(self, above: Tensor, logits: Tensor, ids: list[int], tokens: list[int]) -> Tensor:
        return super().cumulate(torch.zeros_like(above), logits, ids, tokens)

    def rerank(self, scores: Tensor, parents: list[int], most: int) -> list[int]:
        tree_nodes = [0]
        worth = scores.tolist()
        while len(tree_nodes) <= most:
            below = [
                candidate
                for candidate in range(1, len(worth))
                if parents[candidate] in tree_nodes and candidate not in tree_nodes
            ]
            tree_nodes.append(max(below, key=worth.__getitem__))
        return sorted(tree_nodes[1:])


@drafted_fault(
    "path-scores-not-accumulated",
    "arXiv 2406.16858, section 4.1: the value of a node is the product of the confidences along its path",
    "a dynamic tree whose second level is larger than its frontier",
)
def not_accumulated(seams: Seams) -> Seams:
    """A candidate's score is its own log-probability, without those along the path to it.

    An unlikely node's likely child then outranks the children of likely nodes. A child needs a parent in the tree: the
    rerank takes the best candidate whose parent is held, one by one.
    """
    return replace(seams, trees=OwnScores())


@drafted_fault(
    "frontier-one-short",
    "arXiv 2406.16858, section 4.1: the top-k tokens of each layer are the input of the next",
    "a dynamic tree of two levels, in which the last expanded node has a child",
)
@in_place_of("trees.frontier")
def one_short(trees: TreeGrowth, scores: Tensor, most: int) -> list[int]:
    """Each level is expanded by a node less than the tree asks for, down to one node."""
    return trees.frontier(scores, max(most - 1, 1))


@drafted_fault(
    "frontier-of-first-candidates",
    "arXiv 2406.16858, section 4.1: the top-k tokens of each layer are the input of the next",
    "a dynamic tree of three levels whose best candidates are not all children of the first node",
)
@in_place_of("trees.frontier")
def first_candidates(trees: TreeGrowth, scores: Tensor, most: int) -> list[int]:
    """The first candidates of a level are expanded in place of the best: those below its first nodes."""
    return list(range(min(most, len(scores))))


@drafted_fault(
    "rerank-keeps-first-candidates",
    "arXiv 2406.16858, section 4.2: the candidates of all layers are reranked, and the best m are kept",
    "a dynamic tree with more candidates than nodes",
)
@in_place_of("trees.rerank")
def not_reranked(trees: TreeGrowth, scores: Tensor, parents: list[int], most: int) -> list[int]:
    """The tree holds the first candidates by number: the uppermost levels in place of the best nodes."""
    return list(range(1, most + 1))
