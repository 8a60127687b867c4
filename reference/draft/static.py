"""Static: the common base of drafts that fill the same tree at every step."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, TypeVar

from specverify.reference.draft.base import Draft, Tokens, single_shape
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft_trees import (
    Dispatch,
    DraftTree,
    Expansion,
    Stopped,
    most_rank,
    open_rows,
    outlines,
    tree_description,
    tree_kind,
)
from specverify.reference.malformed import Malformed
from specverify.reference.tree import RankTree, Shape

StaticT = TypeVar("StaticT", bound="Static")


class Static(Draft):
    """A draft with the same tree at all steps; each kind has the field `shape`.

    A kind with scores may fill a dynamic tree, whose shape follows from its own probabilities, or the static tree that
    a table gives for the number of requests that step together.

    Attributes:
        WORD: The kind in the text of reports.
    """

    WORD: ClassVar[str]
    trees = None
    reads: HiddenStates | None = None
    shape: DraftTree

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """See `Draft`; of a dynamic tree the outline, of a table its trees."""
        return outlines(self.shape)

    @property
    def branches(self) -> bool:
        """See `Draft`."""
        return super().branches if self.expansion is None else self.expansion.branches

    @property
    def expansion(self) -> Expansion | None:
        """See `Draft`."""
        return self.shape if isinstance(self.shape, Expansion) else None

    @property
    def dispatch(self) -> Dispatch | None:
        """See `Draft`."""
        return self.shape if isinstance(self.shape, Dispatch) else None

    @property
    def stopped(self) -> Stopped | None:
        """See `Draft`."""
        return self.shape if isinstance(self.shape, Stopped) else None

    def in_batches(self: StaticT, sizes: Tokens) -> StaticT:
        """See `Draft`."""
        table = self.dispatch
        return self if table is None else replace(self, shape=replace(table, batches=sizes))  # type: ignore[type-var]

    @property
    def tree_kind(self) -> str:
        """See `Draft`."""
        return tree_kind(self.shape)

    @property
    def open_rows(self) -> int:
        """See `Draft`."""
        return open_rows(self.shape)

    @property
    def has_confidence_head(self) -> bool:
        """Whether the draft's weights give a confidence beside the scores of a token."""
        return False

    def check_stop(self) -> None:
        """Raise Malformed where paths end by a confidence that the draft does not have."""
        if self.stopped is not None and self.stopped.when == "head" and not self.has_confidence_head:
            raise Malformed("shape.when", "head, and the draft has no confidence head")

    def check_rank(self, num_tokens: int) -> None:
        """Raise Malformed where the tree asks for a rank beyond the `num_tokens` tokens that the draft can name."""
        fields = {"dynamic": "shape.top_k", "dispatched": "shape.trees", "stopped": "shape.tree"}
        field = fields.get(self.tree_kind, "shape.rank")
        rank = most_rank(self.shape)
        if rank >= num_tokens:
            raise Malformed(field, f"rank {rank} needs more than the {num_tokens} tokens it can name")

    def with_shapes(self: StaticT, shapes: tuple[Shape, ...]) -> StaticT:
        """See `Draft`; a shape without ranks gets the best children, in the order of its rows.

        One shape makes the tree static. Several are the trees of the first rows of the draft's table.
        """
        trees = tuple(shape if isinstance(shape, RankTree) else best_first(shape) for shape in shapes)
        table = self.dispatch
        if table is not None and len(trees) > 1:
            return replace(self, shape=table.with_trees(trees))  # type: ignore[type-var]
        single_shape(trees)
        return replace(self, shape=trees[0])  # type: ignore[type-var]

    def with_widest_tree(self: StaticT, tree: RankTree) -> StaticT:
        """The draft with `tree`, whose paths end where those of its own tree would."""
        static = self.with_shapes((tree,))
        if self.stopped is None:
            return static
        return replace(static, shape=replace(self.stopped, tree=tree))  # type: ignore[type-var]

    def as_chain(self: StaticT) -> StaticT:
        """A chain of best tokens with at least two levels: on one level, all rules for chains are the same."""
        height = max(self.height, 2)
        return self.with_widest_tree(RankTree((0, *range(height)), (0,) * (height + 1)))

    @property
    def description(self) -> str:
        """See `Draft`."""
        if isinstance(self.shape, Expansion):
            return f"{self.WORD} draft of a dynamic tree ({self.shape.description})"
        if isinstance(self.shape, Dispatch):
            return f"{self.WORD} draft of a tree by batch size ({self.shape.description})"
        if isinstance(self.shape, Stopped):
            return f"{self.WORD} draft of {self.shape.description}"
        return f"{self.WORD} draft of {tree_description(self.shape)}"

    def refuses_draws(self, draws: str) -> str | None:
        """See `Draft`; which tokens a dynamic tree keeps depends on the tokens, so no law gives a drawn one."""
        if self.expansion is not None and self.has_law and draws != "top-k":
            return f"draws {draws}: a dynamic tree of drawn tokens follows no law that a rule could correct (use top-k)"
        return None

    def simpler(self: StaticT) -> Iterator[StaticT]:
        """Drafts with a smaller dynamic tree; with one tree of the table, or a smaller table; without an early end."""
        for tree in self.dispatch.trees if self.dispatch is not None else ():
            yield self.with_shapes((tree,))
        plan = self.expansion or self.dispatch or self.stopped
        for simpler in plan.simpler() if plan is not None else ():
            yield replace(self, shape=simpler)  # type: ignore[type-var]


def best_first(shape: Shape) -> RankTree:
    """`shape` with the ranks 0, 1, … for the siblings of each node, in the order of their rows."""
    ranks = [shape.children[shape.parent[node]].index(node) if node else 0 for node in range(len(shape))]
    return RankTree(shape.parent, tuple(ranks))
