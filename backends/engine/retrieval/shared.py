"""The tries that requests of one server share."""

from backends.engine.retrieval.trie import NgramTrie
from reference.draft import Draft
from reference.draft.trie import Trie


class SharedTries:
    """A trie for each draft that asks for a shared one; it learns the tokens of a request as they come."""

    def __init__(self) -> None:
        self._tries: dict[Draft, NgramTrie] = {}
        self._seen: dict[int, int] = {}

    def of(self, draft: Draft) -> NgramTrie | None:
        """The trie of all requests whose draft equals `draft`; None for one that learns from its request alone."""
        if not draft.shared:
            return None
        if draft not in self._tries:
            assert isinstance(draft, Trie)
            self._tries[draft] = NgramTrie(draft.order, draft.capacity)
        return self._tries[draft]

    def learn(self, number: int, draft: Draft, tokens: list[int]) -> None:
        """Let the trie of `draft` learn the tokens of request `number` that are new; do nothing if it shares none."""
        trie = self.of(draft)
        if trie is None:
            return
        for at in range(self._seen.get(number, 0), len(tokens)):
            trie.learn(tokens, at)
        self._seen[number] = len(tokens)
