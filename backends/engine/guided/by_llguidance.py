"""The matcher of the library llguidance."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.engine.guided.matcher import Matcher
from specverify.backends.engine.guided.tokens import Token, rule_tokens
from specverify.reference.grammar import Grammar

SETTINGS = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
"""The form of JSON texts that the dialect has."""


class LlguidanceMatcher(Matcher):
    """A matcher of llguidance; it never reads the end token, which the library counts in some states only.

    Where the grammar forces the next bytes, the library's mask names the tokenizer's own token for them alone. Every
    way to spell them is legal here, so that each token which agrees with the forced bytes is asked for.

    Its `rollback` is not used: with llguidance 1.9.1 a mask may lack legal tokens after some rollbacks (rules `item*`
    with `item ::= [ab] [01]{0,2}`), and a copy of the matcher costs two microseconds.

    The library lexes: of two terminals the one that matches more is taken, and the grammar `"ab" | [ab] root` then has
    no text "abab". EBNF rules are written for it with terminals of one character, of which none matches more.
    """

    def __init__(self, grammar: Grammar) -> None:
        import llguidance

        self._size = len(grammar.words)
        self._words = _word_bytes(grammar.words)
        self._matchers_before: list[Any] = []
        self._matcher = llguidance.LLMatcher(_vocabulary(grammar.words), _text(grammar))
        if self._matcher.is_error():
            error = " ".join(self._matcher.get_error().split())
            raise Unsupported(f"llguidance refuses the grammar: {error[:160]}")

    def legal(self) -> Tensor:
        """See `Matcher`."""
        if self._matcher.is_stopped():  # its mask would be that of the end token, and the next one an error for good
            return torch.zeros(self._size, dtype=torch.bool)
        forced = self._matcher.compute_ff_bytes()
        if forced:
            candidates = [token for token, word in enumerate(self._words) if word and _agree(word, forced)]
            row = torch.zeros(self._size, dtype=torch.bool)
            row[[token for token in candidates if self._matcher.validate_tokens([token]) == 1]] = True
            return row
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return torch.tensor(np.unpackbits(bits, bitorder="little")[: self._size].astype(bool))

    def complete(self) -> bool:
        """See `Matcher`."""
        return bool(self._matcher.is_accepting())

    def push(self, token: int) -> bool:
        """See `Matcher`."""
        # `consume_token` would leave the matcher in an error for good.
        if self._matcher.is_stopped():
            return False
        matcher_before = self._matcher.deep_copy()
        is_legal = bool(self._matcher.try_consume_tokens([token]) == 1)
        if is_legal:
            self._matchers_before.append(matcher_before)
        return is_legal

    def pop(self) -> None:
        """See `Matcher`."""
        self._matcher = self._matchers_before.pop()

    def keep(self) -> None:
        """See `Matcher`."""
        self._matchers_before.clear()


def _agree(word: bytes, forced: bytes) -> bool:
    return word.startswith(forced) or forced.startswith(word)


@lru_cache(maxsize=16)
def _word_bytes(words: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(map(bytes.fromhex, words))


def _text(grammar: Grammar) -> str:
    import llguidance

    matcher = llguidance.LLMatcher
    if grammar.kind == "regex":
        return str(matcher.grammar_from_regex(grammar.text))
    if grammar.kind == "ebnf":
        return str(matcher.grammar_from_lark(lark_rules(grammar.text)))
    return str(matcher.grammar_from_json_schema(grammar.text, overrides=SETTINGS))


def lark_rules(text: str) -> str:
    """EBNF rules in the syntax of Lark, with the rule `start` for `root`."""
    rules = rule_tokens(text)
    names = {name: "start" if name == "root" else f"rule{i}" for i, name in enumerate(rules)}

    def written(token: Token) -> str:
        if token.kind == "set":
            return "/[" + "".join(f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in token.spans) + "]/"
        if token.kind == "count":
            return f"{{{token.least},{token.most if token.most >= 0 else ''}}}"
        return names[token.name] if token.kind == "call" else token.kind

    # A count stands right behind what it repeats.
    lines = (f"{names[name]}: {' '.join(map(written, body))}".replace(" {", "{") for name, body in rules.items())
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=16)
def _vocabulary(words: tuple[str, ...]) -> Any:
    import llguidance

    spelled = _word_bytes(words)
    ids = {word: token for token, word in enumerate(spelled)}
    longest = max(map(len, spelled))

    class Words:
        eos_token_id, bos_token_id = len(spelled), None

        def __init__(self) -> None:
            # A token without text is special: the library then never allows it.
            self.special_token_ids = [len(spelled), *(token for token, word in enumerate(spelled) if not word)]
            self.tokens = [*(word or f"<no text {token}>".encode() for token, word in enumerate(spelled)), b"</s>"]

        def __call__(self, text: str | bytes) -> list[int]:
            """The longest words that spell a text, without the bytes that none does: raising would end the matcher."""
            rest_of_text = text.encode() if isinstance(text, str) else text
            ids_found = []
            while rest_of_text:
                size = next((size for size in range(longest, 0, -1) if rest_of_text[:size] in ids), 1)
                ids_found += [ids[rest_of_text[:size]]] if rest_of_text[:size] in ids else []
                rest_of_text = rest_of_text[size:]
            return ids_found

    size = len(spelled) + 1
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Words()), n_vocab=size, eos_token=size - 1, slices=[])
