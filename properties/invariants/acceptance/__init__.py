"""Invariants of acceptance: accepted nodes, the coins that decide, and the laws.

`walk.py` judges the accepted path and the emitted tokens, `coins.py` each random decision, `streams.py` the places of
random numbers, and `law.py` the exact probability distribution of the emitted tokens. `counts.py` judges the counts of
engines that show tokens alone, and `company.py` compares what a request drafts and accepts beside others with what it
does alone.
"""

from specverify.properties.invariants.acceptance import coins, company, counts, law, streams, walk

INVARIANTS = (
    *walk.INVARIANTS,
    *coins.INVARIANTS,
    *streams.INVARIANTS,
    *law.INVARIANTS,
    *counts.INVARIANTS,
    *company.INVARIANTS,
)
