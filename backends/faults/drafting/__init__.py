"""Faults of drafting: proposals, the draft's cache, and tensor-parallel ranks."""
