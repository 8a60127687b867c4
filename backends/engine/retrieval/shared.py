"""The tries that requests of one server share."""

from specverify.backends.engine.retrieval.trie import NgramTrie
from specverify.reference.draft import Draft
from specverify.reference.draft.trie import Trie


class SharedTries:
    """A trie for each draft that asks for a shared one; it learns the tokens of a request as they come."""

    def __init__(self) -> None:
        self._tries: dict[Draft, NgramTrie] = {}
        self._num_learned: dict[int, int] = {}

    def trie_of(self, draft: Draft) -> NgramTrie | None:
        """The trie of all requests whose draft equals `draft`; None for one that learns from its request alone."""
        if not draft.shared:
            return None
        if draft not in self._tries:
            assert isinstance(draft, Trie)
            self._tries[draft] = NgramTrie(draft.order, draft.capacity)
        return self._tries[draft]

    def learn(self, number: int, draft: Draft, tokens: list[int]) -> None:
        """Let the trie of `draft` learn the tokens of request `number` that are new; do nothing if it shares none."""
        trie = self.trie_of(draft)
        if trie is None:
            return
        for i in range(self._num_learned.get(number, 0), len(tokens)):
            trie.learn(tokens, i)
        self._num_learned[number] = len(tokens)
