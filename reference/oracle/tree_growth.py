"""Growth: a tree under construction, whose siblings are named by a draft's law.

The whole tree is drawn at once, or the children of a node when a rule first looks at them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from reference.oracle.acceptance import Row, without
from reference.oracle.coin_source import Chance, Number
from reference.tree import Shape, Tree

Path = tuple[int, ...]
"""Tokens below the root."""

T = TypeVar("T")


def siblings(chance: Chance, draws: str, rows: Sequence[Row], nodes: Sequence[int]) -> dict[int, int]:
    """Tokens of the children `nodes` of one node, the k-th child's from the law `rows[k]`.

    A child for which no token is left is missing. top-k: the k-th most probable token of the row, the lower id among
    equals. without-replacement: drawn by the coin (draft, child) from the row without the tokens of earlier siblings.
    with-replacement: drawn from the row by the same coin.
    """
    named: dict[int, int] = {}
    for k, (node, row) in enumerate(zip(nodes, rows, strict=True)):
        if draws == "top-k":
            ranked = sorted((token for token in range(len(row)) if row[token] > 0), key=lambda at: (-row[at], at))
            if k < len(ranked):
                named[node] = ranked[k]
            continue
        left = without(row, set(named.values())) if draws == "without-replacement" else list(row)
        if any(left):
            named[node] = chance.choose("draft", node, left)
    return named


class Growth:
    """A tree under construction: tokens, paths below the root, and proposals of the nodes drawn so far."""

    def __init__(
        self, chance: Chance, shape: Shape, draft: Callable[[Path, int], Row], draws: str, tokens: Path | None
    ) -> None:
        self._chance, self._shape, self._draft, self._draws, self._tokens = chance, shape, draft, draws, tokens
        self.token = {0: tokens[0] if tokens else 0}
        self.path: dict[int, Path] = {0: ()}
        self.proposal: dict[int, Row] = {0: ()}
        self._children: dict[int, tuple[int, ...]] = {}

    def children(self, node: int) -> tuple[int, ...]:
        """The children of `node`, drawn now if they have not been drawn before."""
        if node not in self._children:
            below, path = self._shape.children[node], self.path[node]
            rows = [self._draft(path, k) for k in range(len(below))]
            if self._tokens is not None:
                named = {child: self._tokens[child] for child in below}
            else:
                named = siblings(self._chance, self._draws, rows, below)
            for child, row in zip(below, rows, strict=True):
                if child in named:
                    self.token[child] = named[child]
                    self.path[child] = (*path, named[child])
                    # A token that no coin drew counts as surely proposed.
                    drawn = self._tokens is None and self._draws != "top-k"
                    self.proposal[child] = row if drawn else one_hot(named[child], row)
            self._children[node] = tuple(named)
        return self._children[node]

    def tree(self) -> tuple[list[int], Tree]:
        """The whole tree, and for each of its rows the node of the shape that stands in that row."""
        level = [0]
        while level:
            # Level by level, as engines draft: a node's own token is known before its children are drawn.
            level = [child for node in level for child in self.children(node)]
        # A child without a token left is missing, so rows may be fewer than the shape's nodes.
        kept = sorted(self.token)
        row_of = {node: row for row, node in enumerate(kept)}
        parents = tuple(row_of[self._shape.parent[node]] for node in kept)
        return kept, Tree(parents, tuple(self.token[node] for node in kept))


@dataclass(frozen=True)
class Unfinished:
    """The tree as rules see it; a node's children are drawn when a rule reads them."""

    children: "Lazily[tuple[int, ...]]"
    token: dict[int, int]


class Lazily(Sequence[T]):
    """A table that computes a row when the row is read."""

    def __init__(self, row: Callable[[int], T]) -> None:
        self._row = row

    def __getitem__(self, at: Any) -> T:  # type: ignore[override]
        return self._row(at)

    def __len__(self) -> int:
        raise TypeError("a tree in the making has no size yet")


def one_hot(token: int, row: Row) -> list[Number]:
    """The law that gives `token` probability 1, in the arithmetic of `row`."""
    return [0 * value + (at == token) for at, value in enumerate(row)]
