"""Strategy for n-gram tries of bounded size."""

from hypothesis import strategies as st

from specverify.properties.strategies.draft.drawing import DraftSetting, draws
from specverify.properties.strategies.draft.static import large_static_trees, rank_trees
from specverify.reference.draft.trie import Trie

MOST_HELD = 10
"""Most n-grams of a small trie; most prompts and their outputs have more."""

UNBOUNDED = 1024
"""N-grams of a trie that forgets nothing."""


@draws(Trie.TAG)
@st.composite
def bounded_tries(draw: st.DrawFn, setting: DraftSetting) -> Trie:
    """A trie of n-grams of two to four tokens; three in four are so small that they forget."""
    order = draw(st.integers(2, 4))
    capacity = UNBOUNDED if draw(st.integers(0, 3)) == 3 else draw(st.integers(2, MOST_HELD))
    trees = large_static_trees if setting.large_trees else rank_trees
    return Trie(draw(trees(setting.model.vocab_size)), order, capacity)
