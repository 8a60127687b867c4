"""Static: the common base of drafts that fill one tree of ranks at every step."""

from dataclasses import replace
from typing import ClassVar, TypeVar

from reference.draft.base import Draft, only
from reference.draft.hidden import HiddenStates
from reference.tree import RankTree, Shape

Own = TypeVar("Own", bound="Static")


class Static(Draft):
    """A draft with the same tree of ranks at all steps; each kind has the field `shape`.

    Attributes:
        WORD: The kind in the text of reports.
    """

    WORD: ClassVar[str]
    trees = None
    reads: HiddenStates | None = None
    shape: RankTree

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """See `Draft`."""
        return (self.shape,)

    def with_shapes(self: Own, shapes: tuple[Shape, ...]) -> Own:
        """See `Draft`; a shape without ranks gets the best children, in the order of its rows."""
        shape = only(shapes)
        filled = shape if isinstance(shape, RankTree) else best_first(shape)
        return replace(self, shape=filled)  # type: ignore[type-var]

    def as_chain(self: Own) -> Own:
        """A chain of best tokens with at least two levels: on one level, all rules for chains are the same."""
        height = max(self.shape.height, 2)
        return self.with_shapes((RankTree((0, *range(height)), (0,) * (height + 1)),))

    @property
    def told(self) -> str:
        """See `Draft`."""
        return f"{self.WORD} draft of {len(self.shape)} node{'s' * (len(self.shape) > 1)}"


def best_first(shape: Shape) -> RankTree:
    """`shape` with the ranks 0, 1, … for the siblings of each node, in the order of their rows."""
    ranks = [shape.children[shape.parent[node]].index(node) if node else 0 for node in range(len(shape))]
    return RankTree(shape.parent, tuple(ranks))
