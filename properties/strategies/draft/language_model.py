"""Draft models: small ones of the gallery, some of which can name a part of the target's vocabulary only."""

from hypothesis import strategies as st

from properties.strategies.draft.drawing import Given, draws
from properties.strategies.draft.static import rank_trees
from properties.strategies.models import drafts
from reference.draft import LanguageModel


@st.composite
def vocabularies(draw: st.DrawFn, vocab: int) -> tuple[int, ...]:
    """The whole vocabulary (empty), or some of its ids, at least two."""
    if vocab < 4 or draw(st.booleans()):
        return ()
    step = draw(st.integers(2, 3))
    return tuple(sorted({*range(draw(st.integers(0, 1)), vocab, step), vocab - 1}))


@draws(LanguageModel.TAG)
@st.composite
def model_drafts(draw: st.DrawFn, given: Given) -> LanguageModel:
    """A model, its static tree, and its vocabulary."""
    vocab = given.model.vocab_size
    vocabulary = draw(vocabularies(vocab))
    shape = draw(rank_trees(len(vocabulary) or vocab))
    return LanguageModel(draw(drafts(given.model)), shape, vocabulary)
