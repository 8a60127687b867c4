"""The shell of SpecVerify: differential tests for tree speculative decoding.

This package holds commands, plan, campaign and pytest plugin. The work is done in `reference`, `backends`,
`properties` and `reports`.
"""

from specverify.shadowing import guard

__version__ = "0.1.0"

pytest_plugins = ("specverify.pytest_plugin",)
"""The plugin that `pytest -p specverify` loads; importing this package alone imports nothing of pytest."""

# Before any other import of ours: a shadowing package would be imported in place of the right one.
guard()
