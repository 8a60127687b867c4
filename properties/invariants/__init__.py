"""What must hold: every invariant there is, in the order in which reports list them."""

from properties.invariant import Invariant
from properties.invariants import acceptance, attention, cache, drafts, lossless, structure, visibility

ALL: tuple[Invariant, ...] = (
    *structure.INVARIANTS,
    *attention.INVARIANTS,
    *visibility.INVARIANTS,
    *acceptance.INVARIANTS,
    *cache.INVARIANTS,
    *drafts.INVARIANTS,
    *lossless.INVARIANTS,
)
