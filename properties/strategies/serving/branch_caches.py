"""Strategy for several branch caches of one request.

They are drawn for a case that is drawn already, so that a case without them stays the same.
"""

from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.within import ignored_settings
from specverify.reference.abilities import Abilities
from specverify.reference.case import Case
from specverify.reference.layout import PLAIN

NUMBERS = (2, 3, 64)
"""Most branches at once: with few, one of them takes what is left of a wide tree."""


@st.composite
def with_branch_caches(draw: st.DrawFn, case: Case, within: Abilities | None) -> Case:
    """`case`, in every second one whose trees may branch over the layout `branch`, with several branch caches."""
    if case.layout.kind != PLAIN or not case.draft.branches or "branches" in ignored_settings(within):
        return case
    if draw(st.booleans()):
        return case
    return replace(case, layout=replace(case.layout, branches=draw(st.sampled_from(NUMBERS))))
