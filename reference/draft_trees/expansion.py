"""Expansion: a dynamic tree, grown by path probability and cut."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from specverify.reference.malformed import Malformed
from specverify.reference.rules import OMIT_DEFAULT
from specverify.reference.tree import RankTree

MOST_NODES = 4096
"""Most nodes of a dynamic tree, the root included."""


@dataclass(frozen=True)
class Expansion:
    """A dynamic tree (EAGLE-2, arXiv 2406.16858): its shape follows from the draft's own probabilities.

    The `top_k` best children of the root are the candidates of level 1. Each of the `top_k` best candidates of a level
    gives its `top_k` best children as candidates of the next level, down to level `depth`. The score of a candidate is
    the sum of the log-probabilities along its path, over the tokens that the draft can name, without temperature, added
    in float32 or wider. The tree holds the root and the `total - 1` best candidates of all levels, in the order of
    their numbers.

    Candidates are numbered level by level; within a level by the number of their parent, then from the best child to
    the last. Of equal scores the lower number is better, so that a child whose log-probability rounds to 0 never
    outlives its parent. Of equal logits the lower id is the better child.

    Attributes:
        top_k: The candidates that each expanded node gives, and the nodes of a level that are expanded.
        depth: The number of levels below the root.
        total: The number of nodes, the root included.
        rerank: False for a greedy top-k tree: it holds the `top_k` best candidates of each level in place of the best
            of all, so that `total` is 1 + top_k * depth.
    """

    top_k: int
    depth: int
    total: int
    rerank: bool = field(default=True, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        for name, least in (("top_k", 1), ("depth", 1), ("total", 2)):
            if getattr(self, name) < least:
                raise Malformed(name, f"{getattr(self, name)} is less than {least}")
        if self.total > min(self.candidates + 1, MOST_NODES):
            most = min(self.candidates + 1, MOST_NODES)
            raise Malformed("total", f"{self.total} nodes; top {self.top_k} over {self.depth} levels give {most}")
        if not self.rerank and self.total != 1 + self.top_k * self.depth:
            num_nodes = 1 + self.top_k * self.depth
            raise Malformed(
                "total", f"{self.total}: without reranking the tree has 1 + top_k * depth = {num_nodes} nodes"
            )

    @property
    def candidates(self) -> int:
        """The number of candidates of all levels."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def open_rows(self) -> int:
        """The rows of one proposal in the draft's cache: every expanded node, the root included."""
        return 1 + self.top_k * (self.depth - 1)

    @cached_property
    def outline(self) -> RankTree:
        """A static tree with as many nodes, as deep as the dynamic tree can become; it may take other shapes too."""
        height = min(self.depth, self.total - 1)
        parent, rank, depth = [0, *range(height)], [0] * (height + 1), [*range(height + 1)]
        node = 0
        while len(parent) < self.total:
            # Each node of the first chain has its child of rank 0 already, and gets the others.
            for next_rank in range(1 if node < height else 0, self.top_k if depth[node] < self.depth else 0):
                if len(parent) < self.total:
                    parent.append(node)
                    rank.append(next_rank)
                    depth.append(depth[node] + 1)
            node += 1
        return RankTree(tuple(parent), tuple(rank))

    @property
    def branches(self) -> bool:
        """Whether a node of the dynamic tree may get more than one child; its outline may be a chain all the same."""
        return self.top_k > 1 and self.total > 2

    def simpler(self) -> Iterator["Expansion"]:
        """Dynamic trees with fewer nodes, levels or children; none where a tree would have too few candidates."""
        for top_k, depth in ((self.top_k - 1, self.depth), (self.top_k, self.depth - 1), (self.top_k, self.depth)):
            if top_k and depth:
                most = top_k + (depth - 1) * top_k**2 + 1
                num_nodes = 1 + top_k * depth if not self.rerank else min(self.total, most)
                for total in (num_nodes, num_nodes - 1) if self.rerank else (num_nodes,):
                    if total > 1 and (top_k, depth, total) != (self.top_k, self.depth, self.total):
                        yield replace(self, top_k=top_k, depth=depth, total=total)

    @property
    def description(self) -> str:
        """The tree in a few words for a page."""
        way = "best" if self.rerank else "greedy"
        return f"{self.total} {way} nodes of the top {self.top_k} over {self.depth} level{'s' * (self.depth > 1)}"
