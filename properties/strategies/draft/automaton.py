"""Strategy for drafts that continue an earlier occurrence by a suffix automaton."""

from hypothesis import strategies as st

from specverify.properties.strategies.draft.drawing import DraftSetting, draws
from specverify.reference.draft.automaton import Automaton
from specverify.reference.tree import RankTree

LONGEST_CHAIN = 5
"""Most tokens that are continued."""


@draws(Automaton.TAG)
@st.composite
def automata(draw: st.DrawFn, setting: DraftSetting) -> Automaton:
    """A chain of one to five tokens, after the first or the last occurrence of a suffix of one or two tokens."""
    height = draw(st.integers(1, LONGEST_CHAIN))
    chain = RankTree((0, *range(height)), (0,) * (height + 1))
    return Automaton(chain, draw(st.integers(1, 2)), draw(st.booleans()))
