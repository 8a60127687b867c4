"""Growth: a tree in the making, whose siblings are named by a draft's law, all at once or as they are looked at."""

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
    """Tokens of the children `nodes` of one node, the k-th from the law `rows[k]`; one that has none left is missing.

    top-k: the k-th most probable token of its row, the lower id among equals. without-replacement: drawn by the coin
    (draft, child) from its row without the tokens of earlier siblings. with-replacement: drawn from its row.
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
    """A tree in the making: its nodes' tokens, paths below the root, and proposals, as far as it has been drawn."""

    def __init__(
        self, chance: Chance, shape: Shape, draft: Callable[[Path, int], Row], draws: str, tokens: Path | None
    ) -> None:
        self._chance, self._shape, self._draft, self._draws, self._tokens = chance, shape, draft, draws, tokens
        self.token = {0: tokens[0] if tokens else 0}
        self.path: dict[int, Path] = {0: ()}
        self.proposal: dict[int, Row] = {0: ()}
        self._children: dict[int, tuple[int, ...]] = {}

    def children(self, node: int) -> tuple[int, ...]:
        """Children of `node`, which are drawn now if they were not before."""
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
                    drawn = self._tokens is None and self._draws != "top-k"
                    self.proposal[child] = row if drawn else one_hot(named[child], row)
            self._children[node] = tuple(named)
        return self._children[node]

    def tree(self) -> tuple[list[int], Tree]:
        """The whole tree, and for each of its rows the node of the shape that stands there."""
        level = [0]
        while level:
            level = [child for node in level for child in self.children(node)]
        kept = sorted(self.token)
        row_of = {node: row for row, node in enumerate(kept)}
        parents = tuple(row_of[self._shape.parent[node]] for node in kept)
        return kept, Tree(parents, tuple(self.token[node] for node in kept))


@dataclass(frozen=True)
class Unfinished:
    """The tree as rules see it, whose nodes are drawn as they are looked at."""

    children: "Lazily[tuple[int, ...]]"
    token: dict[int, int]


class Lazily(Sequence[T]):
    """A table whose rows are computed when they are asked for."""

    def __init__(self, row: Callable[[int], T]) -> None:
        self._row = row

    def __getitem__(self, at: Any) -> T:  # type: ignore[override]
        return self._row(at)

    def __len__(self) -> int:
        raise TypeError("a tree in the making has no size yet")


def one_hot(token: int, row: Row) -> list[Number]:
    """The law that is certain of `token`, in the arithmetic of `row`."""
    return [0 * value + (at == token) for at, value in enumerate(row)]
