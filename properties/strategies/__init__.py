"""Hypothesis strategies for models, trees, prompts and whole cases."""

from specverify.properties.strategies.cases import cases, session_cases

__all__ = ["cases", "session_cases"]
