"""Invariants of the output: speculative decoding and batching do not change it.

A greedy request emits the tokens of plain decode; a sampled request emits tokens from the same law.
"""

from specverify.properties.invariants.lossless import (
    distribution,
    guided,
    output,
    processing,
    promises,
    ranks,
    sessions,
)

INVARIANTS = (
    *output.INVARIANTS,
    *processing.INVARIANTS,
    *guided.INVARIANTS,
    *ranks.INVARIANTS,
    *distribution.INVARIANTS,
    *sessions.INVARIANTS,
    *promises.INVARIANTS,
)
