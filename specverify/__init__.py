"""Differential tests for tree speculative decoding: the shell (commands, plan, campaign, pytest plugin)."""

from specverify.shadowing import guard

__version__ = "0.1.0"

pytest_plugins = ("specverify.pytest_plugin",)
"""The plugin that `pytest -p specverify` loads; importing this package alone imports nothing of pytest."""

guard()
