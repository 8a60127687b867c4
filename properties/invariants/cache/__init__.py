"""Invariants of caches: commits, layouts, shared pages, recurrent state."""

from specverify.properties.invariants.cache import commits, layouts, pages, recurrent

INVARIANTS = (*commits.INVARIANTS, *layouts.INVARIANTS, *pages.INVARIANTS, *recurrent.INVARIANTS)
