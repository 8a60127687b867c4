"""Components: one function of a stranger, judged in its place in our engine.

`contract.py` checks a function and its answers; `planted.py`, `sampler.py` and `tree_builder.py` hold the kinds, and
`component.py` makes the backend.
"""

from specverify.backends.adapt.component.component import CONTRACTS, ComponentBackend, component

__all__ = ["CONTRACTS", "ComponentBackend", "component"]
