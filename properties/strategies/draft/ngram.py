"""Strategy for n-gram tries that fill static trees."""

from hypothesis import strategies as st

from specverify.properties.strategies.draft.drawing import DraftSetting, draws
from specverify.properties.strategies.draft.static import large_static_trees, static_trees
from specverify.reference.draft import Ngram


@draws(Ngram.TAG)
@st.composite
def tries(draw: st.DrawFn, setting: DraftSetting) -> Ngram:
    """An n-gram trie for n of 2 to 4, so contexts of one to three tokens, over a static tree."""
    trees = large_static_trees if setting.large_trees else static_trees
    return Ngram(draw(trees(setting.model.vocab_size)), draw(st.integers(2, 4)))
