"""Differential tests for tree speculative decoding: the shell (commands, plan, campaign, pytest plugin)."""

from importlib.util import find_spec
from pathlib import Path

__version__ = "0.1.0"

pytest_plugins = ("specverify.pytest_plugin",)
"""What `pytest -p specverify` loads; nothing of pytest is imported where only this package is."""

_ROOT = Path(__file__).resolve().parent.parent
for _room in ("reference", "backends", "properties", "reports"):
    _found = find_spec(_room)
    if _found is None or not _found.origin or _ROOT not in Path(_found.origin).parents:
        raise ImportError(
            f"`{_room}` is {_found.origin if _found else 'missing'}, not {_ROOT / _room}: "
            f"another package hides it (pip uninstall {_room}, or run in a fresh environment)"
        )
