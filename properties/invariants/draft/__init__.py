"""Invariants of drafts: the hidden states that they read, and their proposals."""

from specverify.properties.invariants.draft import (
    candidates,
    dispatch,
    dynamic_trees,
    hidden_states,
    proposals,
    sessions,
    stopped_trees,
)

# A draft that was given a wrong state proposes a wrong tree: the state is judged first.
INVARIANTS = (
    *hidden_states.INVARIANTS,
    *candidates.INVARIANTS,
    *dispatch.INVARIANTS,
    *dynamic_trees.INVARIANTS,
    *stopped_trees.INVARIANTS,
    *proposals.INVARIANTS,
    *sessions.INVARIANTS,
)
