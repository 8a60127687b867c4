"""Growth: a tree under construction, whose siblings are named by a draft's law.

The whole tree is drawn at once, or the children of a node when a rule first looks at them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from specverify.reference.oracle.acceptance import Row, without_tokens
from specverify.reference.oracle.coin_source import Chance, Number
from specverify.reference.tree import Shape, Tree

Path = tuple[int, ...]
"""Tokens below the root."""

T = TypeVar("T")


def siblings(chance: Chance, draws: str, rows: Sequence[Row], nodes: Sequence[int]) -> dict[int, int]:
    """Tokens of the children `nodes` of one node, the k-th child's from the law `rows[k]`.

    A child for which no token is left is missing. top-k: the k-th most probable token of the row, the lower id among
    equals. without-replacement: drawn by the coin (draft, child) from the row without the tokens of earlier siblings.
    with-replacement: drawn from the row by the same coin.
    """
    tokens: dict[int, int] = {}
    for k, (node, row) in enumerate(zip(nodes, rows, strict=True)):
        if draws == "top-k":
            ranked = sorted(
                (token for token in range(len(row)) if row[token] > 0),
                key=lambda candidate: (-row[candidate], candidate),
            )
            if k < len(ranked):
                tokens[node] = ranked[k]
            continue
        remaining = without_tokens(row, set(tokens.values())) if draws == "without-replacement" else list(row)
        if any(remaining):
            tokens[node] = chance.choose("draft", node, remaining)
    return tokens


class Growth:
    """A tree under construction: tokens, paths below the root, and proposals of the nodes drawn so far."""

    def __init__(
        self, chance: Chance, shape: Shape, draft: Callable[[Path, int], Row], draws: str, tokens: Path | None
    ) -> None:
        self._chance = chance
        self._shape = shape
        self._draft = draft
        self._draws = draws
        self._tokens = tokens
        self.token = {0: tokens[0] if tokens else 0}
        self.path: dict[int, Path] = {0: ()}
        self.proposal: dict[int, Row] = {0: ()}
        self._children: dict[int, tuple[int, ...]] = {}

    def children(self, node: int) -> tuple[int, ...]:
        """The children of `node`, drawn now if they have not been drawn before."""
        if node not in self._children:
            children, path = self._shape.children[node], self.path[node]
            rows = [self._draft(path, k) for k in range(len(children))]
            if self._tokens is not None:
                tokens = {child: self._tokens[child] for child in children}
            else:
                tokens = siblings(self._chance, self._draws, rows, children)
            for child, row in zip(children, rows, strict=True):
                if child in tokens:
                    self.token[child] = tokens[child]
                    self.path[child] = (*path, tokens[child])
                    # A token that no coin drew counts as surely proposed.
                    is_drawn = self._tokens is None and self._draws != "top-k"
                    self.proposal[child] = row if is_drawn else one_hot(tokens[child], row)
            self._children[node] = tuple(tokens)
        return self._children[node]

    def tree(self) -> tuple[list[int], Tree]:
        """The whole tree, and for each of its rows the node of the shape that stands in that row."""
        level = [0]
        while level:
            # Level by level, as engines draft: a node's own token is known before its children are drawn.
            level = [child for node in level for child in self.children(node)]
        # A child without a token left is missing, so rows may be fewer than the shape's nodes.
        nodes = sorted(self.token)
        row_of = {node: row for row, node in enumerate(nodes)}
        parents = tuple(row_of[self._shape.parent[node]] for node in nodes)
        return nodes, Tree(parents, tuple(self.token[node] for node in nodes))


@dataclass(frozen=True)
class UnfinishedTree:
    """The tree as rules see it; a node's children are drawn when a rule reads them."""

    children: "LazyTable[tuple[int, ...]]"
    token: dict[int, int]


class LazyTable(Sequence[T]):
    """A table that computes a row when the row is read."""

    def __init__(self, row: Callable[[int], T]) -> None:
        self._row = row

    def __getitem__(self, index: Any) -> T:  # type: ignore[override]
        return self._row(index)

    def __len__(self) -> int:
        raise TypeError("a tree in the making has no size yet")


def one_hot(token: int, row: Row) -> list[Number]:
    """The law that gives `token` probability 1, in the arithmetic of `row`."""
    return [0 * value + (index == token) for index, value in enumerate(row)]
