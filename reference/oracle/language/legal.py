"""The legal next tokens after an output, token by token and byte by byte.

Every output is read from its beginning: no state is carried from one question to the next.
"""

import sys
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specverify.reference.grammar import Grammar
from specverify.reference.oracle.language import reading, schemas
from specverify.reference.oracle.language.expressions import NEVER, Expression, Language
from specverify.reference.trace import Array, frozen

Trie = dict[int, "Trie | tuple[int, ...]"]


@dataclass(frozen=True)
class LegalTokens:
    """The state of a text.

    Attributes:
        tokens: bool [V]; the legal next tokens. All are False where the text can only end, or where it is refused.
        refused: Whether a token of the text was not legal after the tokens before it.
    """

    tokens: Array
    refused: bool

    @property
    def is_closed(self) -> bool:
        """Whether the text is legal and no token may follow it."""
        return not self.refused and not bool(self.tokens.any())


@lru_cache(maxsize=256)
def language(kind: str, text: str, library: str) -> Language:
    """The language of a grammar, as `library` reads it.

    Raises:
        Malformed: The grammar is outside the dialect of its kind, or matches no text.
    """
    if kind == "ebnf":
        return reading.read_rules(text, library)
    return Language(reading.read_regular(text, library) if kind == "regex" else schemas.schema(text, library))


@lru_cache(maxsize=8192)
def legal_after(grammar: Grammar, ends: tuple[int, ...], output: tuple[int, ...]) -> LegalTokens:
    """The legal tokens after `output`, the tokens of a request behind its prompt.

    Args:
        grammar: The grammar; its library is not asked, but what it alone reads in its way is read so.
        ends: The token ids that end a text (`Stops.eos`).
        output: The tokens so far.

    Raises:
        Malformed: as `language`.
    """
    language_, words = language(grammar.kind, grammar.text, grammar.library), _words(grammar.words)
    legal = np.zeros(len(words), dtype=bool)
    begin = beginning(grammar, output)
    before, text = (output, ()) if begin is None else (output[:begin], output[begin:])
    for i, token in enumerate(before):
        if i not in _free_places(grammar):
            if token != grammar.markers[0][i - grammar.budget]:
                return LegalTokens(frozen(legal), True)
        elif token in ends:
            return LegalTokens(frozen(legal), i + 1 < len(output))
    if begin is None:
        free = len(output) in _free_places(grammar)
        legal[slice(None) if free else [grammar.markers[0][len(output) - grammar.budget]]] = True
        return LegalTokens(frozen(legal), False)
    state = language_.start
    for i, token in enumerate(text):
        if token in ends:
            # After a legal end there is no text that a further token could go on with.
            refused = not language_.accepts_empty(state) or i + 1 < len(text)
            return LegalTokens(frozen(legal), refused)
        state = _read(language_, state, words[token]) if words[token] else NEVER
        if state == NEVER:
            return LegalTokens(frozen(legal), True)
    legal[list(_next_tokens(language_, state, _trie(grammar.words)))] = True
    legal[list(ends)] = language_.accepts_empty(state)
    return LegalTokens(frozen(legal), False)


def beginning(grammar: Grammar, output: tuple[int, ...]) -> int | None:
    """The number of tokens of `output` up to the end of its first marker; None where it holds none."""
    if not grammar.markers:
        return 0
    ends_of_markers = (
        end
        for end in range(1, len(output) + 1)
        if any(output[:end][-len(marker) :] == marker for marker in grammar.markers)
    )
    return next(ends_of_markers, None)


def _free_places(grammar: Grammar) -> range:
    """The places of output tokens before a marker that the budget does not force."""
    return range(grammar.budget) if grammar.budget else range(sys.maxsize)


def is_closed(grammar: Grammar | None, ends: tuple[int, ...], output: tuple[int, ...]) -> bool:
    """Whether the output ends because no token may follow it; False without a grammar."""
    return grammar is not None and legal_after(grammar, ends, output).is_closed


@lru_cache(maxsize=64)
def _words(words: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(map(bytes.fromhex, words))


@lru_cache(maxsize=64)
def _trie(words: tuple[str, ...]) -> Trie:
    """The words by their bytes; the key -1 holds the ids of the tokens that end at a place."""
    root: Trie = {}
    for token, word in enumerate(_words(words)):
        place = root
        for byte in word:
            child = place.setdefault(byte, {})
            assert isinstance(child, dict)
            place = child
        if word:
            tokens = place.get(-1, ())
            assert isinstance(tokens, tuple)
            place[-1] = (*tokens, token)
    return root


def _read(language_: Language, state: Expression, word: bytes) -> Expression:
    for byte in word:
        state = language_.derivative(state, byte)
    return state


def _next_tokens(language_: Language, state: Expression, place: Trie) -> list[int]:
    """The ids of the tokens whose bytes some text of `state` begins with."""
    tokens: list[int] = []
    for byte, child in place.items():
        if isinstance(child, tuple):
            tokens += child
        elif (next_state := language_.derivative(state, byte)) != NEVER:
            tokens += _next_tokens(language_, next_state, child)
    return tokens
