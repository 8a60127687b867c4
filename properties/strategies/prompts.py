"""Prompts: length 1 to a few hundred, dense around windows, chunks and powers of two, ids 0 and V-1 included."""

import numpy as np
from hypothesis import strategies as st

from reference.architecture import Seeded

LONGEST = 300


def tokens(vocab: int) -> st.SearchStrategy[int]:
    """Token ids, the two ends of the vocabulary more often than chance."""
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
    vocab = model.vocab_size
    short = st.lists(tokens(vocab), min_size=1, max_size=8).map(tuple)
    seed = st.integers(0, 2**16)
    windows, powers = edges(model)
    near = [length for length in powers if length <= 35]
    edge = st.builds(_seeded, st.just(vocab), st.sampled_from(near), seed)
    # Built twice, since one_of drops a strategy that it already has; windows are few among the models.
    brink = [st.builds(_seeded, st.just(vocab), st.sampled_from(windows or near), seed) for _ in range(2)]
    anywhere = st.builds(_seeded, st.just(vocab), st.integers(1, 24), seed)
    # A repeated stretch gives n-gram drafts something to find.
    echo = st.builds(lambda part, times: (part * times)[:24], short, st.integers(2, 4))
    far = st.builds(_seeded, st.just(vocab), st.one_of(st.sampled_from(powers), st.integers(25, LONGEST)), seed)
    return st.one_of(short, anywhere, echo, edge, *brink, far)
