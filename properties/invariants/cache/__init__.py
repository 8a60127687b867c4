"""Invariants of the KV cache: commits, layouts, and pages that requests share."""

from properties.invariants.cache import commits, layouts, pages

INVARIANTS = (*commits.INVARIANTS, *layouts.INVARIANTS, *pages.INVARIANTS)
