"""Engines under test: they know the words of `reference`, none of its answers, and no prose."""
