"""The matcher of the library xgrammar."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.engine.guided.matcher import Matcher
from specverify.reference.grammar import Grammar


class XgrammarMatcher(Matcher):
    """A matcher of xgrammar; it never reads the end token, after which the library raises."""

    def __init__(self, grammar: Grammar) -> None:
        import xgrammar

        self._size = len(grammar.words)
        self._matcher = xgrammar.GrammarMatcher(_compiled(grammar))
        self._row = xgrammar.allocate_token_bitmask(1, self._size + 1)

    def _bits(self) -> Tensor:
        # The library fills only rows that constrain something, so that the row is made whole before.
        self._row.fill_(-1)
        self._matcher.fill_next_token_bitmask(self._row)
        spread = self._row[0][:, None] >> torch.arange(32, dtype=torch.int32) & 1
        bits: Tensor = spread.flatten()[: self._size + 1].bool()
        return bits

    def legal(self) -> Tensor:
        """See `Matcher`."""
        return self._bits()[: self._size]

    def complete(self) -> bool:
        """See `Matcher`."""
        return bool(self._bits()[self._size])

    def push(self, token: int) -> bool:
        """See `Matcher`."""
        # A word without bytes is taken for a special token, which the library may accept.
        return bool(self.legal()[token]) and bool(self._matcher.accept_token(token))

    def pop(self) -> None:
        """See `Matcher`."""
        self._matcher.rollback(1)


@lru_cache(maxsize=16)
def _compiled(grammar: Grammar) -> Any:
    import xgrammar

    # An end token of our own behind the vocabulary: those of a request are the engine's to allow.
    words = [*grammar.token_bytes, b"</s>"]
    info = xgrammar.TokenizerInfo(words, vocab_size=len(words), stop_token_ids=[len(words) - 1])
    compiler = xgrammar.GrammarCompiler(info)
    try:
        if grammar.kind == "regex":
            return compiler.compile_regex(grammar.text)
        if grammar.kind == "ebnf":
            return compiler.compile_grammar(grammar.text)
        return compiler.compile_json_schema(grammar.text, any_whitespace=False, separators=(",", ":"), strict_mode=True)
    except RuntimeError as why:
        raise Unsupported(f"xgrammar refuses the grammar: {' '.join(str(why).split())[:160]}") from why
