"""Faults of drafting: proposals, the draft's cache, and ranks that disagree."""
