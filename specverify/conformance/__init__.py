"""Conformance: tests of any engine that ship with the package.

In any project, with pytest installed:

    pytest -p specverify --pyargs specverify.conformance --backend my_engine:open_

A test file of the project's own needs one call: `agrees("my_engine:open_")`.
"""

from specverify.conformance.drawn import agrees

__all__ = ["agrees"]
