"""Strategy for batches whose prompts are padded on the left.

It is drawn for a case that is drawn already, so that a case without it stays the same.
"""

from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.prompts import LONGEST
from specverify.properties.strategies.within import ignored_settings
from specverify.reference.abilities import Abilities
from specverify.reference.case import Case

PADDED = 8
"""One case of a single request in this many is padded."""

TOGETHER = 4
"""The same for sessions, whose requests have unequal lengths."""

FRONTS = (1, 2, 5)
"""Dead columns in front of the longest request."""


@st.composite
def with_left_padding(draw: st.DrawFn, case: Case, within: Abilities | None) -> Case:
    """`case`, or in one of several the same case padded on the left; long prompts and sharded targets are not."""
    if "left_pad" in ignored_settings(within) or case.ranks > 1 or len(case.prompt) > LONGEST:
        return case
    interval = PADDED if case.session is None else TOGETHER
    if draw(st.integers(0, interval - 1)) < interval - 1:
        return case
    return replace(case, layout=replace(case.layout, left_pad=draw(st.sampled_from(FRONTS))))
