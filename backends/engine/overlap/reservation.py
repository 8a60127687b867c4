"""The columns and positions that a step needs while another is in flight."""

from specverify.reference.case import Case

STEPS = 2
"""Blocks beyond the host's committed length: the one in flight and the one that is launched, as SGLang reserves."""


def reserved_columns(rows: int) -> int:
    """The number of columns beyond those that the host knows to be committed, for blocks of at most `rows` rows."""
    return STEPS * rows


def fits(case: Case, tokens: int, flying: int) -> bool:
    """Whether the next tree lies inside the model's positions, however much the steps in flight accept.

    Args:
        case: The request.
        tokens: Number of its tokens that the host knows.
        flying: Number of its steps in flight.
    """
    height = case.draft.height
    return tokens + flying * (height + 1) + height <= case.max_positions
