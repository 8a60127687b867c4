"""llguidance 1.7.6: where a grammar leaves one text to go on with, its mask has the tokenizer's own tokens alone.

Other tokens that spell the same text are legal to the matcher. So a model that is masked draws from another law there
than its own among the legal tokens. Found by lossless.greedy-match in vllm 0.32.0 with this library. Exit code 1 where
the mask lacks a token that the matcher accepts, 0 otherwise.
"""

import sys
from importlib.metadata import version

import llguidance
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import Unigram

WORDS = ["a", ")", "))", "</s>"]


def tokenizer() -> llguidance.LLTokenizer:
    """A tokenizer that cuts a text into the fewest of WORDS."""
    own = Tokenizer(Unigram([(word, -1.0) for word in WORDS], unk_id=3))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens([WORDS[3]])
    return llguidance.LLTokenizer(own.to_str(), n_vocab=len(WORDS), eos_token=3)


if __name__ == "__main__":
    matcher = llguidance.LLMatcher(tokenizer(), llguidance.LLMatcher.grammar_from_regex(r"a\)\)"))
    matcher.consume_token(0)
    mask = matcher.compute_bitmask()
    unmasked = [word for token, word in enumerate(WORDS[:3]) if mask[0] >> token & 1]
    accepted = [word for token, word in enumerate(WORDS[:3]) if matcher.validate_tokens([token]) == 1]
    print("llguidance", version("llguidance"), f"unmasks {unmasked} and accepts {accepted}")
    sys.exit(int(unmasked != accepted))
