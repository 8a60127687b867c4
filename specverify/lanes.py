"""Lanes: the parts into which the drawn cases of a gate can be split.

Each lane draws a fixed share of the cases from a seed of its own. Shards and workers take whole lanes, so that the
cases depend on the number of lanes and on nothing else.
"""

LANES = 24
"""Most lanes of a run where nobody asks for another number; a run has at most as many shards and workers at work."""

MOST_LANES = 4096
"""Most lanes that may be asked for."""

LEAST = 6
"""Fewest cases of a lane where a run has more than one: Hypothesis draws six from one seed."""


def lanes_of(cases: int, most: int = LANES) -> int:
    """The number of lanes of a run of `cases` drawn cases, at most `most`; the drawn cases depend on it."""
    return max(1, min(most, cases // LEAST))
