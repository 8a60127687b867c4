"""Taps: what a running engine does, written as a trace while it runs.

A tap wraps a few functions of an installed engine, calls them as they are, and notes what goes in and what comes out.
The lines are those that `specverify trace check` reads. What a tap cannot see is left out, and is unobserved.
"""

from specverify.traces.taps.tapping import ENGINES, tap

__all__ = ["ENGINES", "tap"]
