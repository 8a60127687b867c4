"""Every invariant, in the order in which reports list them."""

from properties.invariants import (
    acceptance,
    attention,
    cache,
    coins,
    distribution,
    drafts,
    laws,
    layouts,
    lossless,
    processing,
    sessions,
    structure,
    visibility,
)
from properties.verdict.invariant import Invariant

ALL: tuple[Invariant, ...] = (
    *structure.INVARIANTS,
    *attention.INVARIANTS,
    *visibility.INVARIANTS,
    *acceptance.INVARIANTS,
    *coins.INVARIANTS,
    *laws.INVARIANTS,
    *cache.INVARIANTS,
    *layouts.INVARIANTS,
    *sessions.INVARIANTS,
    *drafts.INVARIANTS,
    *lossless.INVARIANTS,
    *processing.INVARIANTS,
    *distribution.INVARIANTS,
)
