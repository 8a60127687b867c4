"""Differential tests for tree speculative decoding: the shell (commands, plan, campaign, pytest plugin)."""

from specverify.shadowing import guard

__version__ = "0.1.0"

pytest_plugins = ("specverify.pytest_plugin",)
"""What `pytest -p specverify` loads; nothing of pytest is imported where only this package is."""

guard()
