"""The n-gram draft: prompt lookup as a tree.

It proposes tokens from a trie of the n-grams seen so far in prompt and output.
"""

from torch import Tensor

from specverify.backends.engine.draft.base import CachelessDraft, Opening, Proposal, opens
from specverify.backends.engine.draft.ngram_trie import fill_shape
from specverify.backends.engine.sampling.step import StepSampling
from specverify.reference.draft import Ngram
from specverify.reference.tree import RankTree

Followers = dict[int, tuple[int, int]]
"""From a token to (number of times it followed a context, index of the last time)."""


class NgramDraft(CachelessDraft):
    """Counts the tokens that followed each context of 1 to `order - 1` tokens, among tokens of prompt and output only.

    Proposed tokens never enter the trie, so a rejection needs no undo.
    """

    def __init__(self, shape: RankTree, order: int) -> None:
        self.shape = shape
        self._order = order
        self.trie: dict[tuple[int, ...], Followers] = {}
        self._num_learned = 0

    def propose(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Proposal:
        """Fill the fixed shape; a node whose rank does not exist is left out, with all nodes below it."""
        self._grow(tokens)
        return Proposal(fill_shape(self.shape, tokens, self._ranked_followers))

    def _grow(self, tokens: list[int]) -> None:
        # Token 0 follows no context.
        for i in range(max(self._num_learned, 1), len(tokens)):
            for width in range(1, min(self._order - 1, i) + 1):
                followers = self.trie.setdefault(tuple(tokens[i - width : i]), {})
                count, _ = followers.get(tokens[i], (0, 0))
                followers[tokens[i]] = (count + 1, i)
        self._num_learned = len(tokens)

    def _ranked_followers(self, tokens: list[int]) -> list[int]:
        """The tokens that followed the longest known suffix of `tokens`, the most frequent first, then the latest."""
        for width in range(min(self._order - 1, len(tokens)), 0, -1):
            followers = self.trie.get(tuple(tokens[-width:]))
            if followers:
                return sorted(followers, key=lambda token: followers[token], reverse=True)
        return []


@opens(Ngram.TAG)
def open_draft(opening: Opening) -> NgramDraft:
    """Open a draft with an empty trie, which grows with the tokens of the request."""
    draft = opening.case.draft
    assert isinstance(draft, Ngram)
    return NgramDraft(draft.shape, draft.order)
