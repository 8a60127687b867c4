"""The KV cache: what a commit keeps, in every layout and in shared pages."""

from properties.invariants.cache import commits, layouts, pages

INVARIANTS = (*commits.INVARIANTS, *layouts.INVARIANTS, *pages.INVARIANTS)
