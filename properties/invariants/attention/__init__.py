"""Invariants of attention: a row depends on its context and root path alone."""

from specverify.properties.invariants.attention import columns, context, experts, visibility, whole_runs

INVARIANTS = (
    # A wrong choice of columns comes before what attention makes of it.
    *columns.INVARIANTS,
    *context.INVARIANTS,
    *visibility.INVARIANTS,
    *experts.INVARIANTS,
    *whole_runs.INVARIANTS,
)
