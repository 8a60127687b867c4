"""Attention: what a row sees, and that nothing else moves it."""

from properties.invariants.attention import batch, context, pages, visibility

INVARIANTS = (*context.INVARIANTS, *visibility.INVARIANTS, *pages.INVARIANTS, *batch.INVARIANTS)
