"""Faults of the output: what is emitted, and where it stops."""
