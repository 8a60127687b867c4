"""The legal next tokens after an output, token by token and byte by byte.

Every output is read from its beginning: no state is carried from one question to the next.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from reference.grammar import Grammar
from reference.oracle.language import reading, schemas
from reference.oracle.language.expressions import NEVER, Expression, Language
from reference.trace import Array, frozen

Trie = dict[int, "Trie | tuple[int, ...]"]


@dataclass(frozen=True)
class Legal:
    """The state of a text.

    Attributes:
        tokens: bool [V]; the legal next tokens. All are False where the text can only end, or where it is refused.
        refused: Whether a token of the text was not legal after the tokens before it.
    """

    tokens: Array
    refused: bool

    @property
    def closed(self) -> bool:
        """Whether the text is legal and no token may follow it."""
        return not self.refused and not bool(self.tokens.any())


@lru_cache(maxsize=256)
def language(kind: str, text: str) -> Language:
    """The language of a grammar.

    Raises:
        Malformed: The grammar is outside the dialect of its kind, or matches no text.
    """
    if kind == "ebnf":
        return reading.rules(text)
    return Language(reading.regular(text) if kind == "regex" else schemas.schema(text))


@lru_cache(maxsize=8192)
def legal_after(grammar: Grammar, ends: tuple[int, ...], output: tuple[int, ...]) -> Legal:
    """The legal tokens after `output`, the tokens of a request behind its prompt.

    Args:
        grammar: The grammar; its library is not asked.
        ends: The token ids that end a text (`Stops.eos`).
        output: The tokens so far.

    Raises:
        Malformed: as `language`.
    """
    spoken, words = language(grammar.kind, grammar.text), _words(grammar.words)
    legal = np.zeros(len(words), dtype=bool)
    state = spoken.start
    for at, token in enumerate(output):
        if token in ends:
            # After a legal end there is no text that a further token could go on with.
            refused = not spoken.ends(state) or at + 1 < len(output)
            return Legal(frozen(legal), refused)
        state = _read(spoken, state, words[token]) if words[token] else NEVER
        if state == NEVER:
            return Legal(frozen(legal), True)
    legal[list(_going_on(spoken, state, _trie(grammar.words)))] = True
    legal[list(ends)] = spoken.ends(state)
    return Legal(frozen(legal), False)


def closed(grammar: Grammar | None, ends: tuple[int, ...], output: tuple[int, ...]) -> bool:
    """Whether the output ends because no token may follow it; False without a grammar."""
    return grammar is not None and legal_after(grammar, ends, output).closed


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
            below = place.setdefault(byte, {})
            assert isinstance(below, dict)
            place = below
        if word:
            known = place.get(-1, ())
            assert isinstance(known, tuple)
            place[-1] = (*known, token)
    return root


def _read(spoken: Language, state: Expression, word: bytes) -> Expression:
    for byte in word:
        state = spoken.after(state, byte)
    return state


def _going_on(spoken: Language, state: Expression, place: Trie) -> list[int]:
    """The ids of the tokens whose bytes some text of `state` begins with."""
    found: list[int] = []
    for byte, below in place.items():
        if isinstance(below, tuple):
            found += below
        elif (then := spoken.after(state, byte)) != NEVER:
            found += _going_on(spoken, then, below)
    return found
