"""Matchers: the position of a request in its grammar, and the plain matcher.

A matcher goes forward token by token and back again. It belongs to one request and one thread.
"""

from abc import ABC, abstractmethod
from functools import lru_cache

import torch
from torch import Tensor

from specverify.backends.engine.guided.program import Program, State
from specverify.reference.grammar import Grammar


class Matcher(ABC):
    """The position in a grammar after some tokens, none of them an end token."""

    @abstractmethod
    def legal(self) -> Tensor:
        """The tokens whose bytes some text of the language goes on with, bool [V] on the CPU; end tokens are False."""

    @abstractmethod
    def complete(self) -> bool:
        """Whether the text may end here."""

    @abstractmethod
    def push(self, token: int) -> bool:
        """Go on with a token that is no end token; False, and no change, if it is not legal."""

    @abstractmethod
    def pop(self) -> None:
        """Take the last token back that `push` took."""

    def keep(self) -> None:  # noqa: B027
        """Keep the tokens that were pushed for good: `pop` does not go behind this place."""


Trie = dict[int, "Trie"]


class PlainMatcher(Matcher):
    """The matcher of the engine's own automaton."""

    def __init__(self, grammar: Grammar) -> None:
        self._program = _compiled(grammar.kind, grammar.text)
        self._masks = _masks(grammar)
        self._words = _words(grammar.words)
        self._ends, self._trie = _tree(grammar.words)
        self._states = [self._program.start]

    def legal(self) -> Tensor:
        """See `Matcher`."""
        state = self._states[-1]
        if state not in self._masks:
            row = torch.zeros(len(self._words), dtype=torch.bool)
            self._mark(row, state, self._trie, b"")
            self._masks[state] = row
        return self._masks[state]

    def _mark(self, row: Tensor, state: State, below: Trie, head: bytes) -> None:
        for byte, further in below.items():
            next_state = self._program.after(state, byte)
            word = head + bytes([byte])
            if next_state:
                row[self._ends.get(word, [])] = True
                self._mark(row, next_state, further, word)

    def complete(self) -> bool:
        """See `Matcher`."""
        return self._program.complete(self._states[-1])

    def push(self, token: int) -> bool:
        """See `Matcher`."""
        state = self._states[-1] if self._words[token] else frozenset()
        for byte in self._words[token]:
            state = self._program.after(state, byte)
        if state:
            self._states.append(state)
        return bool(state)

    def pop(self) -> None:
        """See `Matcher`."""
        self._states.pop()

    def keep(self) -> None:
        """See `Matcher`."""
        del self._states[:-1]


@lru_cache(maxsize=64)
def _compiled(kind: str, text: str) -> Program:
    return Program(Grammar(kind, text, ("00",)))


@lru_cache(maxsize=64)
def _masks(grammar: Grammar) -> dict[State, Tensor]:
    """The masks of a grammar by state, which all its matchers share: a mask is computed once and never changed."""
    return {}


@lru_cache(maxsize=64)
def _words(words: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(map(bytes.fromhex, words))


@lru_cache(maxsize=64)
def _tree(words: tuple[str, ...]) -> tuple[dict[bytes, list[int]], Trie]:
    """The ids of each word, and the words as a tree of bytes."""
    ids: dict[bytes, list[int]] = {}
    tree: Trie = {}
    for token, word in enumerate(_words(words)):
        place = tree
        for byte in word:
            place = place.setdefault(byte, {})
        if word:
            ids.setdefault(word, []).append(token)
    return ids, tree
