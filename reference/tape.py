"""The tape: the place of every uniform random number that a step may use.

A coin is one uniform in [0, 1). Each decision of a step has its own place on the tape, so that an unused coin never
moves another coin.
"""

from functools import lru_cache

import numpy as np

from specverify.reference.sampling import Sampling
from specverify.reference.trace import Array

KINDS = ("draft", "order", "accept", "bonus")
"""The decisions that coins make: drawing a token, ordering siblings, accepting, choosing the token after the path."""

RESOLUTION = 2.0**-24
"""Seeded coins are multiples of this: exact in float32, as those of torch.rand are."""


def stride(nodes: int) -> int:
    """Number of coins that a step of at most `nodes` nodes owns: draft, order and accept for each node, one bonus."""
    return 3 * nodes + 1


def place(kind: str, node: int, nodes: int) -> int:
    """The place, within its step, of the coin of `kind` for `node`; `node` is ignored for the bonus.

    Draft: the coin that draws the node's token. Order: at the k-th trial among the children of a node, the coin of the
    k-th child chooses which sibling is tried (specinfer). Accept: the coin of the drafted node that is tried;
    target-only has one coin a level, that of the parent.
    """
    return 3 * nodes if kind == "bonus" else KINDS.index(kind) * nodes + node


def coins(sampling: Sampling, step: int, nodes: int) -> Array:
    """The uniforms of step `step`, float64 [stride(nodes)]: those that the tape holds, then those of the seed."""
    start, count = step * stride(nodes), stride(nodes)
    uniforms: Array = _seeded(sampling.seed, start, count).copy()
    num_taped = np.array(sampling.tape[start : start + count])
    uniforms[: len(num_taped)] = num_taped
    return uniforms


@lru_cache(maxsize=1024)  # the variants of a case ask for the same coins
def _seeded(seed: int, start: int, count: int) -> Array:
    """The uniforms `start` to `start + wide` of `seed`."""
    seeded = np.random.Generator(np.random.Philox(key=seed))
    seeded.bit_generator.advance(start // 4)  # type: ignore[attr-defined]  # Philox makes four at a time
    # Rounded down, so that no coin becomes 1.
    uniforms: Array = np.floor(seeded.random(start % 4 + count)[start % 4 :] / RESOLUTION) * RESOLUTION
    return uniforms
