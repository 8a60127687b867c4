"""Invariants of attention: a row depends on its context and root path alone."""

from specverify.properties.invariants.attention import batch, context, experts, pages, visibility

INVARIANTS = (
    *context.INVARIANTS,
    *visibility.INVARIANTS,
    *experts.INVARIANTS,
    *pages.INVARIANTS,
    *batch.INVARIANTS,
)
