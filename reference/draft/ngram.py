"""Ngram: a trie over the tokens so far (prompt lookup, as a tree)."""

from dataclasses import dataclass

from specverify.reference.draft.static import Static
from specverify.reference.malformed import Malformed
from specverify.reference.tree import RankTree


@dataclass(frozen=True)
class Ngram(Static):
    """A trie over the tokens so far: a node's children are the tokens that most often followed its context.

    The context of a node is a suffix of the sequence and the node's path, of `order - 1` tokens at most and one at
    least: the longest suffix that occurs earlier with a successor. Successors rank by how often they followed the
    context, then by how recently. A rank that does not exist leaves its node, and the nodes below, out of the tree.
    """

    TAG = "ngram"
    WORD = "n-gram"
    model = None
    vocabulary = ()

    shape: RankTree
    order: int = 3

    def __post_init__(self) -> None:
        if self.order < 2:
            raise Malformed("order", f"{self.order}: a context needs at least one token (order 2)")
