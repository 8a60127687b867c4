"""Invariants of attention: a row depends on its context and root path alone."""

from specverify.properties.invariants.attention import columns, context, experts, visibility, whole_runs

INVARIANTS = (
    *context.INVARIANTS,
    *visibility.INVARIANTS,
    *experts.INVARIANTS,
    *columns.INVARIANTS,
    *whole_runs.INVARIANTS,
)
