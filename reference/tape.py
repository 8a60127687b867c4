"""The tape: which uniform decides what, so that a coin nobody used never moves another's."""

import numpy as np

from reference.sampling import Sampling
from reference.trace import Array

KINDS = ("draft", "order", "accept", "bonus")
"""The decisions of coins: a drawn token, the order of siblings, an acceptance, the token after the path."""

RESOLUTION = 2.0**-24
"""Seeded coins are multiples of it: exact in float32, as torch.rand's are."""


def stride(nodes: int) -> int:
    """Coins that one step of at most `nodes` nodes owns: draft, order and accept for each node, and one bonus."""
    return 3 * nodes + 1


def place(kind: str, node: int, nodes: int) -> int:
    """Where in its step the coin of `kind` for `node` lies; `node` is ignored for the bonus.

    Draft: the coin that draws the node's token. Order: at the k-th trial among the children of a node, the coin of
    the k-th child chooses which sibling is tried (specinfer). Accept: the coin of the drafted node that is tried; for
    target-only, which has one coin a level, that of the parent.
    """
    return 3 * nodes if kind == "bonus" else KINDS.index(kind) * nodes + node


def coins(sampling: Sampling, step: int, nodes: int) -> Array:
    """The uniforms of step `step`, float64 [stride(nodes)]: the tape's own, then those of its seed."""
    start, wide = step * stride(nodes), stride(nodes)
    seeded = np.random.Generator(np.random.Philox(key=sampling.seed))
    seeded.bit_generator.advance(start // 4)  # type: ignore[attr-defined]  # Philox makes four at a time
    drawn: Array = np.floor(seeded.random(start % 4 + wide)[start % 4 :] / RESOLUTION) * RESOLUTION
    held = np.array(sampling.tape[start : start + wide])
    drawn[: len(held)] = held
    return drawn
