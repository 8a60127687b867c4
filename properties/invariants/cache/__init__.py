"""Invariants of the KV cache: commits, layouts, pages that requests share, recurrent state."""

from properties.invariants.cache import commits, layouts, pages, recurrent

INVARIANTS = (*commits.INVARIANTS, *layouts.INVARIANTS, *pages.INVARIANTS, *recurrent.INVARIANTS)
