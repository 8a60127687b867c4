"""Acceptance: which nodes a rule accepts, by which coins, and with which law."""

from properties.invariants.acceptance import coins, law, walk

INVARIANTS = (*walk.INVARIANTS, *coins.INVARIANTS, *law.INVARIANTS)
