"""Every invariant, in the order in which reports list them; a file or folder bears the prefix of its invariants."""

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
