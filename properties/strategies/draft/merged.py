"""Strategy for drafts that join the candidates of others."""

from hypothesis import strategies as st

from specverify.properties.strategies.draft.automaton import automata
from specverify.properties.strategies.draft.drawing import DraftSetting, draws
from specverify.properties.strategies.draft.ngram import tries
from specverify.properties.strategies.draft.trie import bounded_tries
from specverify.reference.draft.merged import Merged

MOST_NODES = 14
"""Most nodes of a joined tree."""


@draws(Merged.TAG)
@st.composite
def merged_drafts(draw: st.DrawFn, setting: DraftSetting) -> Merged:
    """Two or three drafts that look tokens up; one joined tree in three may be cut short."""
    lookup_draft = st.one_of(automata(setting), bounded_tries(setting), tries(setting))
    drafts = draw(st.lists(lookup_draft, min_size=2, max_size=3))
    nodes = draw(st.integers(2, MOST_NODES)) if draw(st.integers(0, 2)) == 2 else len(drafts) * MOST_NODES
    return Merged(tuple(drafts), nodes)
