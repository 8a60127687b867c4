"""Components: one function of a stranger, judged in its place in our engine.

`contract.py` checks a function and its answers; each other file holds one kind, and `component.py` makes the backend.
"""

from specverify.backends.adapt.component.component import CONTRACTS, ComponentBackend, component

__all__ = ["CONTRACTS", "ComponentBackend", "component"]
