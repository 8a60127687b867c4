"""Invariants of attention: a row depends on its context and root path alone."""

from properties.invariants.attention import batch, context, pages, visibility

INVARIANTS = (*context.INVARIANTS, *visibility.INVARIANTS, *pages.INVARIANTS, *batch.INVARIANTS)
