"""Merged: several drafts whose candidates are joined to one tree."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from specverify.reference.draft.base import Draft
from specverify.reference.draft.static import Static
from specverify.reference.malformed import Malformed
from specverify.reference.tree import RankTree, Shape


@dataclass(frozen=True)
class SeveralShapes(Shape):
    """The shapes of several drafts below one root, one after the other.

    Attributes:
        rank: The rank of each node in its own draft.
        source: The number of the draft that proposes each node; 0 for the root.
    """

    rank: tuple[int, ...] = ()
    source: tuple[int, ...] = ()


@dataclass(frozen=True)
class Merged(Draft):
    """The trees of several drafts under one root, joined.

    Two nodes with the same tokens from the root are one node. Nodes stand level by level. Within a level those of the
    first draft come first, in the order of their rows, then those of the next draft that are not there yet. The first
    `nodes` of them are the tree, the root included: a parent stands before its children, and no node lacks its parent.

    Attributes:
        drafts: The drafts, which have neither scores nor state beside the text (`ngram`, `trie`, `automaton`).
        nodes: The most nodes of the joined tree.
    """

    TAG = "merged"
    SCHEMA = {  # noqa: RUF012 - read-only
        "type": "object",
        "additionalProperties": False,
        "required": ["kind", "drafts", "nodes"],
        "properties": {
            "kind": {},
            "drafts": {"type": "array", "items": {"$ref": "#/$defs/draft"}, "minItems": 1, "maxItems": 8},
            "nodes": {"type": "integer", "minimum": 1, "maximum": 1048576},
        },
    }
    MOST: ClassVar[int] = 8
    trees = None
    model = None
    vocabulary = ()
    reads = None

    drafts: tuple[Draft, ...]
    nodes: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.drafts) <= self.MOST:
            raise Malformed("drafts", f"{len(self.drafts)} drafts: one to {self.MOST} are joined")
        if self.nodes < 1:
            raise Malformed("nodes", f"{self.nodes}: a tree has at least its root")
        for i, draft in enumerate(self.drafts):
            if not isinstance(draft, Static) or draft.model is not None or draft.has_law or draft.shared:
                kind = "shared trie" if draft.shared else f"{draft.TAG} draft"
                raise Malformed(f"drafts[{i}]", f"no {kind} is joined: its candidates follow from more than the text")

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """See `Draft`; all nodes of all drafts, as if no two had the same tokens and there was no limit."""
        parent, rank, source = [0], [0], [0]
        for number, draft in enumerate(self.drafts):
            (shape,) = draft.shapes
            offset = len(parent) - 1
            assert isinstance(shape, RankTree)
            parent += [parent_node and parent_node + offset for parent_node in shape.parent[1:]]
            rank += shape.rank[1:]
            source += [number] * (len(shape) - 1)
        return (SeveralShapes(tuple(parent), tuple(rank), tuple(source)),)

    def with_shapes(self, shapes: tuple[Shape, ...]) -> "Merged":
        """See `Draft`; a shape that does not tell whose its nodes are limits their number."""
        if len(shapes) != 1:
            raise Malformed("shape", f"{len(shapes)} trees, where the draft has one for all steps")
        (shape,) = shapes
        if not isinstance(shape, SeveralShapes):
            return replace(self, nodes=min(self.nodes, len(shape)))
        drafts = []
        for number, draft in enumerate(self.drafts):
            nodes = [node for node in range(len(shape)) if not node or shape.source[node] == number]
            part = shape.subtree(nodes)
            drafts.append(draft.with_shapes((RankTree(part.parent, part.rank),)))
        return replace(self, drafts=tuple(drafts))

    def as_chain(self) -> "Merged":
        """See `Draft`; the chain of the first draft alone."""
        return replace(self, drafts=(self.drafts[0].as_chain(),))

    @property
    def description(self) -> str:
        """See `Draft`."""
        return f"{' joined with '.join(draft.description for draft in self.drafts)}, {self.nodes} nodes at most"

    @property
    def height(self) -> int:
        """See `Draft`; joined nodes may be fewer than those of the drafts, yet as deep."""
        return min(max(draft.height for draft in self.drafts), self.nodes - 1)

    def simpler(self) -> Iterator["Merged"]:
        """Fewer drafts, each draft with one setting less, and no limit of nodes that cuts."""
        for i in range(len(self.drafts) if len(self.drafts) > 1 else 0):
            yield replace(self, drafts=self.drafts[:i] + self.drafts[i + 1 :])
        for i, draft in enumerate(self.drafts):
            for simpler_draft in draft.simpler():
                yield replace(self, drafts=(*self.drafts[:i], simpler_draft, *self.drafts[i + 1 :]))
