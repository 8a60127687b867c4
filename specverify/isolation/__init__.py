"""Isolation: a backend runs in a process of its own, so that a worker survives it."""
