"""Dispatch: a table of static trees by batch size."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from specverify.reference.draft_trees.names import tree_description
from specverify.reference.malformed import Malformed
from specverify.reference.rules import OMIT_DEFAULT
from specverify.reference.tree import RankTree


@dataclass(frozen=True)
class Dispatch:
    """Static trees, one of which a server takes at each step by the number of requests that step together.

    The source is arXiv 2508.08192: a verify forward of many requests is bound by computation, so that large batches get
    small trees. A step of `n` requests takes the first tree whose bound is at least `n`, and the last tree where no
    bound is.

    The tree depends on the number of requests alone, and not on a token or a coin of the step. Given all earlier
    tokens, each step therefore verifies a static tree, and a rule that is lossless for every tree of the table is
    lossless for the dispatched draft. A request that samples keeps its law in every batch; the tokens that its coins
    give do depend on the batches, as they depend on the tree.

    Attributes:
        up_to: The largest batch of each tree, ascending.
        trees: The tree of each bound.
        batches: The number of requests that step together at each step of a request that is run without a session;
            later steps repeat the last number. Empty: the request steps alone. In a session the actions decide.
    """

    up_to: tuple[int, ...]
    trees: tuple[RankTree, ...]
    batches: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if not self.up_to:
            raise Malformed("up_to", "a table has at least one batch size")
        if len(self.trees) != len(self.up_to):
            raise Malformed("trees", f"{len(self.trees)} trees for {len(self.up_to)} batch sizes")
        if self.up_to[0] < 1 or any(a >= b for a, b in zip(self.up_to, self.up_to[1:], strict=False)):
            raise Malformed("up_to", f"batch sizes ascend from at least 1; these are {list(self.up_to)}")
        if min(self.batches, default=1) < 1:
            raise Malformed("batches", "at least one request takes each step")

    @property
    def description(self) -> str:
        """The table in a few words for a page."""
        return ", ".join(
            f"up to {most}: {tree_description(tree)}" for most, tree in zip(self.up_to, self.trees, strict=True)
        )

    def with_trees(self, trees: tuple[RankTree, ...]) -> "Dispatch":
        """The first rows of the table, with `trees` in place of their own."""
        return replace(self, up_to=self.up_to[: len(trees)], trees=trees)

    def simpler(self) -> Iterator["Dispatch"]:
        """Tables with a row less, and with fewer or smaller batches."""
        for dropped_row in range(len(self.up_to)) if len(self.up_to) > 1 else ():
            kept_rows = [row for row in range(len(self.up_to)) if row != dropped_row]
            up_to = tuple(self.up_to[row] for row in kept_rows)
            trees = tuple(self.trees[row] for row in kept_rows)
            yield replace(self, up_to=up_to, trees=trees)
        for i in range(len(self.batches)):
            yield replace(self, batches=self.batches[:i] + self.batches[i + 1 :])
        for i, size in enumerate(self.batches):
            if size > 1:
                yield replace(self, batches=(*self.batches[:i], size - 1, *self.batches[i + 1 :]))
