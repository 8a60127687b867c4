"""Tries of n-grams over static trees."""

from hypothesis import strategies as st

from properties.strategies.draft.drawing import Given, draws
from properties.strategies.draft.static import rank_trees
from reference.draft import Ngram


@draws(Ngram.TAG)
@st.composite
def tries(draw: st.DrawFn, given: Given) -> Ngram:
    """A static tree, and contexts of one to three tokens."""
    return Ngram(draw(rank_trees(given.model.vocab_size)), draw(st.integers(2, 4)))
