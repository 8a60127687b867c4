"""The draft that proposes tokens from an n-gram trie of bounded size."""

from torch import Tensor

from specverify.backends.engine.draft.base import CachelessDraft, Opening, Proposal, opens
from specverify.backends.engine.draft.ngram_trie import NgramTrie, fill_shape
from specverify.backends.engine.sampling.step import StepSampling
from specverify.reference.draft.trie import Trie
from specverify.reference.tree import RankTree


class TrieDraft(CachelessDraft):
    """Fills a static tree from a trie, which learns tokens of prompt and output alone.

    Attributes:
        shape: The tree.
        trie: The trie of the request.
        num_learned: How many tokens of the request the trie has learnt from this draft.
        learns: Whether the draft lets the trie learn; False for a shared trie, which learns as texts grow.
    """

    def __init__(self, shape: RankTree, trie: NgramTrie, learns: bool = True) -> None:
        self.shape = shape
        self.trie = trie
        self.num_learned = 0
        self.learns = learns

    def propose(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Proposal:
        """Fill the tree; a node whose rank does not exist is left out, with all nodes below it."""
        if self.learns:
            self.grow(tokens)
        return Proposal(fill_shape(self.shape, tokens, self.trie.followers))

    def grow(self, tokens: list[int]) -> None:
        """Let the trie learn the tokens that it has not seen."""
        for i in range(self.num_learned, len(tokens)):
            self.trie.learn(tokens, i)
        self.num_learned = len(tokens)


@opens(Trie.TAG)
def open_draft(opening: Opening) -> TrieDraft:
    """Open a draft with an empty trie, which grows with the tokens of the request, or with the shared one."""
    draft = opening.case.draft
    assert isinstance(draft, Trie)
    if opening.shared is not None:
        return TrieDraft(draft.shape, opening.shared, learns=False)
    return TrieDraft(draft.shape, NgramTrie(draft.order, draft.capacity))
