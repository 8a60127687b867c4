"""Isolation: a backend runs in a process of its own, which the worker that judges it outlives."""
