"""All invariants, in the order in which reports list them.

The name of a file or folder here is the prefix of its invariants: `cache/` holds `cache.isolation`.
"""

from properties.invariants import acceptance, attention, cache, draft, lossless, structure
from properties.verdict.invariant import Invariant

ALL: tuple[Invariant, ...] = (
    *structure.INVARIANTS,
    *attention.INVARIANTS,
    *acceptance.INVARIANTS,
    *cache.INVARIANTS,
    *draft.INVARIANTS,
    *lossless.INVARIANTS,
)
