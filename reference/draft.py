"""The drafts a case may ask for: scripted trees, an n-gram trie, or a small causal language model."""

from dataclasses import dataclass

from reference.architecture import Model
from reference.malformed import Malformed
from reference.tree import RankTree, Tree


@dataclass(frozen=True)
class Scripted:
    """The case draws the trees itself: `trees[k]` is proposed at step k, and the bare root once they run out."""

    trees: tuple[Tree, ...] = ()


@dataclass(frozen=True)
class Ngram:
    """A trie over the tokens so far: a node's children are the tokens that most often followed its context.

    The context of a node is the longest suffix, `order - 1` tokens at most and one at least, of sequence + path that
    occurs earlier with a successor. Successors rank by how often they followed it, then by how recently. A rank that
    does not exist leaves its node and the nodes below it out of the tree.
    """

    shape: RankTree
    order: int = 3

    def __post_init__(self) -> None:
        if self.order < 2:
            raise Malformed("order", f"{self.order}: a context needs at least one token (order 2)")


@dataclass(frozen=True)
class LanguageModel:
    """A small causal model with a KV cache of its own: node i is the `rank[i]`-th best token after its parent.

    Attributes:
        model: The draft's own weights; its vocabulary size is the target's.
        shape: The static tree it fills.
        vocabulary: Target ids that the draft's head can name, ascending (EAGLE-3's reduced vocabulary: draft id d
            means target id `vocabulary[d]`); empty means all of them.
    """

    model: Model
    shape: RankTree
    vocabulary: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(a >= b for a, b in zip(self.vocabulary, self.vocabulary[1:], strict=False)):
            raise Malformed("vocabulary", "target ids must ascend")
        named = len(self.vocabulary) or self.model.vocab_size
        if max(self.shape.rank) >= named:
            raise Malformed("shape.rank", f"rank {max(self.shape.rank)} needs more than the {named} tokens it can name")


Draft = Scripted | Ngram | LanguageModel


def largest(draft: Draft) -> int:
    """Nodes of the largest tree that `draft` proposes."""
    if isinstance(draft, Scripted):
        return max((len(tree) for tree in draft.trees), default=1)
    return len(draft.shape)
