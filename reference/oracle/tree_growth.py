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

STOPS = ("before", "after", "drop")
"""What a draft that ends by its own confidence reads, and what becomes of the token: see `DraftStop`."""


@dataclass(frozen=True)
class DraftStop:
    """The confidence at which drafting ends on a path.

    A round stays lossless where the decision to draft a token reads the tokens before it alone. `drop` reads the token
    itself: an unlikely draw is withdrawn, and the tokens that reach the verification are no draws from q any more.

    Attributes:
        least: The probability that the draft must reach to go on.
        when: One of STOPS. before: the largest probability of the draft's law at a node is compared, and the node gets
            no children (SGLang, llama.cpp). after: the probability of a drawn token is compared, and the token stays,
            without children (transformers, assistant_confidence_threshold). drop: the same, and the token goes.
        cumulated: Whether these probabilities are multiplied along the path before they are compared (DSpark).
    """

    least: Number
    when: str
    cumulated: bool = False

    def ends_at(self, row: Row, above: Number) -> bool:
        """Whether a node whose draft has the law `row`, behind a path of probability `above`, gets no children."""
        return self.when == "before" and max(row) * (above if self.cumulated else 1) < self.least

    def ends_below(self, probability: Number) -> bool:
        """Whether a drawn token of this probability gets no children."""
        return self.when == "after" and probability < self.least

    def drops(self, probability: Number) -> bool:
        """Whether a drawn token of this probability is left out."""
        return self.when == "drop" and probability < self.least


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
        self,
        chance: Chance,
        shape: Shape,
        draft: Callable[[Path, int], Row],
        draws: str,
        tokens: Path | None,
        stop: DraftStop | None = None,
    ) -> None:
        self._chance = chance
        self._shape = shape
        self._draft = draft
        self._draws = draws
        self._tokens = tokens
        self._stop = stop
        self.token = {0: tokens[0] if tokens else 0}
        self.path: dict[int, Path] = {0: ()}
        self.proposal: dict[int, Row] = {0: ()}
        self._children: dict[int, tuple[int, ...]] = {}
        self._likelihood: dict[int, Number] = {}
        self._above: dict[int, Number] = {0: 1}

    def _ends(self, node: int, rows: Sequence[Row]) -> bool:
        """Whether drafting ends at `node`, by the draft's law below it or by the probability of its own token."""
        assert self._stop is not None
        ends_here = any(self._stop.ends_at(row, self._above[node]) for row in rows[:1])
        return ends_here or (node in self._likelihood and self._stop.ends_below(self._likelihood[node]))

    def children(self, node: int) -> tuple[int, ...]:
        """The children of `node`, drawn now if they have not been drawn before."""
        if node not in self._children:
            children, path = self._shape.children[node], self.path[node]
            rows = [self._draft(path, k) for k in range(len(children))]
            if self._stop is not None and self._ends(node, rows):
                children, rows = (), []
            if self._tokens is not None:
                tokens = {child: self._tokens[child] for child in children}
            else:
                tokens = siblings(self._chance, self._draws, rows, children)
            if self._stop is not None:
                above = self._above[node] if self._stop.cumulated else 1
                named = {
                    child: above * row[tokens[child]]
                    for child, row in zip(children, rows, strict=True)
                    if child in tokens
                }
                self._above |= named
                tokens = {child: token for child, token in tokens.items() if not self._stop.drops(named[child])}
                self._likelihood |= named
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
