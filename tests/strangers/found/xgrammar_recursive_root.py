"""xgrammar 0.2.8: where the first rule of a grammar calls itself, the mask lacks tokens that the matcher accepts.

A token that ends an inner call and goes on behind it is left out, as if nothing could follow the end of the first rule.
Found by lossless.logprobs in vllm 0.32.0, whose masks are this library's. Exit code 1 where mask and matcher differ and
agree once another rule is called, 0 otherwise.
"""

import sys
from importlib.metadata import version

import xgrammar

WORDS = [b"(", b")", b"a", b"b", b"a)", b"</s>"]
CALLS_ITSELF = 'root ::= "(" root ")" | "a" | "b" root'
CALLS_ANOTHER = 'root ::= inner\ninner ::= "(" inner ")" | "a" | "b" inner'


def unmasked_words(rules: str, text: list[bytes]) -> list[bytes]:
    """The words that the matcher accepts behind `text`, and its mask lacks."""
    info = xgrammar.TokenizerInfo(WORDS, vocab_size=len(WORDS), stop_token_ids=[len(WORDS) - 1])
    grammar = xgrammar.GrammarCompiler(info).compile_grammar(rules)
    words = []
    for token, word in enumerate(WORDS[:-1]):
        matcher = xgrammar.GrammarMatcher(grammar)
        assert all(matcher.accept_token(WORDS.index(part)) for part in text)
        mask = xgrammar.allocate_token_bitmask(1, len(WORDS))
        matcher.fill_next_token_bitmask(mask)
        if matcher.accept_token(token) and not int(mask[0][0]) >> token & 1:
            words.append(word)
    return words


if __name__ == "__main__":
    itself, another = (unmasked_words(rules, [b"("]) for rules in (CALLS_ITSELF, CALLS_ANOTHER))
    print("xgrammar", version("xgrammar"), f"lacks {itself} where the root calls itself, and {another} elsewhere")
    sys.exit(int(bool(itself) and not another))
