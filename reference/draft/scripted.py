"""Scripted: a draft whose trees stand in the case, one for each step.

Once the trees run out, the draft proposes the bare root.
"""

from collections.abc import Callable
from dataclasses import dataclass

from specverify.reference.draft.base import Draft, Tokens
from specverify.reference.malformed import Malformed
from specverify.reference.tree import Shape, Tree


@dataclass(frozen=True)
class Scripted(Draft):
    """The case holds the trees itself: `trees[k]` is proposed at step k, and the bare root after the last tree."""

    TAG = "scripted"
    model = None
    vocabulary = ()
    reads = None

    trees: tuple[Tree, ...] = ()

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """See `Draft`."""
        return self.trees

    def with_shapes(self, shapes: tuple[Shape, ...]) -> "Scripted":
        """See `Draft`; every shape carries its tokens."""
        # A bare shape has no tokens, and a script cannot invent them.
        trees = tuple(shape for shape in shapes if isinstance(shape, Tree))
        if len(trees) < len(shapes):
            raise Malformed("trees", "a script needs the tokens of its trees")
        return Scripted(trees)

    def as_chain(self) -> "Scripted":
        """The path to the first deepest node of each tree."""
        return Scripted(tuple(_deepest_path(tree) for tree in self.trees))

    @property
    def description(self) -> str:
        """See `Draft`."""
        sizes = [len(tree) for tree in self.trees]
        if len(sizes) < 2:
            return f"{sizes[0]} node{'s' * (sizes[0] > 1)}" if sizes else "no tree"
        return f"{len(sizes)} trees of {' + '.join(map(str, sizes[:6]))}{' + …' if len(sizes) > 6 else ''} nodes"

    def with_renamed_tokens(self, rename: Callable[[Tokens], Tokens], relabel: int) -> "Scripted":
        """See `Draft`."""
        return Scripted(tuple(Tree(tree.parent, rename(tree.token)) for tree in self.trees))

    def token_fields(self) -> list[tuple[str, Tokens]]:
        """See `Draft`."""
        return [(f"trees[{i}].token", tree.token) for i, tree in enumerate(self.trees)]

    def check(self, pending: int) -> None:
        """Raise Malformed unless the first tree hangs from the pending root."""
        if self.trees and self.trees[0].token[0] != pending:
            token = self.trees[0].token[0]
            raise Malformed("trees[0].token[0]", f"{token} is not the last prompt token {pending}")


def _deepest_path(tree: Tree) -> Tree:
    path = tree.path(tree.depth.index(tree.height))
    return Tree((0, *range(len(path) - 1)), tuple(tree.token[node] for node in path))
