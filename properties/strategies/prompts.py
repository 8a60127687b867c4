"""Strategies for prompts of 1 to 300 tokens, and for long ones up to 2050 tokens.

Lengths are dense around windows, ends of chunks and powers of two; token ids 0 and V-1 are frequent.
"""

from functools import cache

import numpy as np
from hypothesis import strategies as st

from specverify.reference.architecture import Seeded

LONGEST = 300
"""Most tokens of an ordinary prompt."""

MARKS = (128, 512, 256, 512, 1024, 1024, 2048)
"""Columns around which long prompts end. Kernels split a prefix of 512 columns in float32 and of 1024 in 16 bits
(`specverify.backends.engine.attention.triton_launch.plan_for_gpu`), and one of 128 under the interpreter
(`plan_for_cpu`)."""


def tokens(vocab: int) -> st.SearchStrategy[int]:
    """Token ids; the first and the last id of the vocabulary are more frequent than by chance."""
    return st.one_of(st.integers(0, vocab - 1), st.sampled_from((0, vocab - 1)))


def brinks(marks: set[int]) -> list[int]:
    """Lengths just below, at and just above each of `marks`."""
    return sorted({mark + off for mark in marks for off in (-1, 0, 1, 2) if 1 <= mark + off <= LONGEST})


def edges(model: Seeded) -> tuple[list[int], list[int]]:
    """Lengths around the model's windows and ends of chunks, if it has any, and around powers of two."""
    arch = model.architecture
    ends = {times * chunk for chunk in arch.chunks for times in (1, 2, 3) if chunk}
    return brinks(ends | {window for window in arch.windows if window}), brinks({2**k for k in range(1, 9)})


def _seeded(vocab: int, length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, vocab, size=length).tolist())


def prompts(model: Seeded) -> st.SearchStrategy[tuple[int, ...]]:
    """Prompts for `model`; the last token is the pending root."""
    return _prompts(model.vocab_size, *map(tuple, edges(model)))


@cache  # Hypothesis validates a strategy once, which takes longer than to draw from it
def _prompts(vocab: int, windows: tuple[int, ...], powers: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    """Prompts with tokens below `vocab`; see `edges` for the lengths around `windows` and `powers`."""
    short = st.lists(tokens(vocab), min_size=1, max_size=8).map(tuple)
    seed = st.integers(0, 2**16)
    near = [length for length in powers if length <= 35]
    edge = st.builds(_seeded, st.just(vocab), st.sampled_from(near), seed)
    # Two strategies, since `one_of` drops a repeated object: lengths around windows are to be twice as frequent.
    brink = [st.builds(_seeded, st.just(vocab), st.sampled_from(windows or near), seed) for _ in range(2)]
    anywhere = st.builds(_seeded, st.just(vocab), st.integers(1, 24), seed)
    # A repeated stretch gives n-gram drafts something to find.
    echo = st.builds(lambda part, times: (part * times)[:24], short, st.integers(2, 4))
    far = st.builds(_seeded, st.just(vocab), st.one_of(st.sampled_from(powers), st.integers(25, LONGEST)), seed)
    return st.one_of(short, anywhere, echo, edge, *brink, far)


def far_lengths(most: int = MARKS[-1]) -> list[int]:
    """Lengths from 1 below to 2 above each of MARKS up to `most`, each as often as its mark occurs.

    The prefix has one token less than the prompt, so that each of the two is one below, at and one above each mark.
    """
    return [mark + off for mark in MARKS for off in (0, 1, 2, -1) if mark <= most]


def far_prompts(model: Seeded, most: int = MARKS[-1]) -> st.SearchStrategy[tuple[int, ...]]:
    """Prompts of `far_lengths(most)` tokens, drawn from a seed."""
    return st.builds(_seeded, st.just(model.vocab_size), st.sampled_from(far_lengths(most)), st.integers(0, 2**16))
