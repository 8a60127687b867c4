"""The matcher of the library llguidance."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backends.base import Unsupported
from backends.engine.guided.matcher import Matcher
from reference.grammar import Grammar

SETTINGS = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
"""The form of JSON texts that the dialect has."""


class LlguidanceMatcher(Matcher):
    """A matcher of llguidance; it never reads the end token, which the library counts in some states only.

    Where the grammar forces the next bytes, the library's mask names the tokenizer's own token for them alone. Every
    way to spell them is legal here, so that each token which agrees with the forced bytes is asked for.
    """

    def __init__(self, grammar: Grammar) -> None:
        import llguidance

        self._size = len(grammar.words)
        self._words = _spelled(grammar.words)
        self._matcher = llguidance.LLMatcher(_vocabulary(grammar.words), _text(grammar))
        if self._matcher.is_error():
            why = " ".join(self._matcher.get_error().split())
            raise Unsupported(f"llguidance refuses the grammar: {why[:160]}")

    def legal(self) -> Tensor:
        """See `Matcher`."""
        if self._matcher.is_stopped():  # its mask would be that of the end token, and the next one an error for good
            return torch.zeros(self._size, dtype=torch.bool)
        forced = self._matcher.compute_ff_bytes()
        if forced:
            ways = [at for at, word in enumerate(self._words) if word and _agree(word, forced)]
            row = torch.zeros(self._size, dtype=torch.bool)
            row[[at for at in ways if self._matcher.validate_tokens([at]) == 1]] = True
            return row
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return torch.tensor(np.unpackbits(bits, bitorder="little")[: self._size].astype(bool))

    def complete(self) -> bool:
        """See `Matcher`."""
        return bool(self._matcher.is_accepting())

    def push(self, token: int) -> bool:
        """See `Matcher`."""
        # `consume_token` would leave the matcher in an error for good.
        return not self._matcher.is_stopped() and self._matcher.try_consume_tokens([token]) == 1

    def pop(self) -> None:
        """See `Matcher`."""
        self._matcher.rollback(1)


def _agree(word: bytes, forced: bytes) -> bool:
    return word.startswith(forced) or forced.startswith(word)


@lru_cache(maxsize=16)
def _spelled(words: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(map(bytes.fromhex, words))


def _text(grammar: Grammar) -> str:
    import llguidance
    from llguidance.gbnf_to_lark import any_to_lark

    matcher = llguidance.LLMatcher
    if grammar.kind == "regex":
        return str(matcher.grammar_from_regex(grammar.text))
    if grammar.kind == "ebnf":
        return str(matcher.grammar_from_lark(any_to_lark(grammar.text)))
    return str(matcher.grammar_from_json_schema(grammar.text, overrides=SETTINGS))


@lru_cache(maxsize=16)
def _vocabulary(words: tuple[str, ...]) -> Any:
    import llguidance

    spelled = _spelled(words)
    ids = {word: at for at, word in enumerate(spelled)}
    longest = max(map(len, spelled))

    class Words:
        eos_token_id, bos_token_id = len(spelled), None

        def __init__(self) -> None:
            # A token without text is special: the library then never allows it.
            self.special_token_ids = [len(spelled), *(at for at, word in enumerate(spelled) if not word)]
            self.tokens = [*(word or f"<no text {at}>".encode() for at, word in enumerate(spelled)), b"</s>"]

        def __call__(self, text: str | bytes) -> list[int]:
            """The longest words that spell a text, without the bytes that none does: raising would end the matcher."""
            left, found = text.encode() if isinstance(text, str) else text, []
            while left:
                size = next((size for size in range(longest, 0, -1) if left[:size] in ids), 1)
                found += [ids[left[:size]]] if left[:size] in ids else []
                left = left[size:]
            return found

    size = len(spelled) + 1
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Words()), n_vocab=size, eos_token=size - 1, slices=[])
