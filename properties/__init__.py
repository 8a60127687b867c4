"""Strategies (what may be drawn), invariants (what must hold), and the verdict on a case; no torch, no prose."""
