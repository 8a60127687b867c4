"""Strategies for draft models, some with a part of the target's vocabulary."""

from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.draft.drawing import DraftSetting, draws, kinds_of_weights
from specverify.properties.strategies.draft.dynamic import trees
from specverify.properties.strategies.draft.static import static_trees
from specverify.properties.strategies.models import LISTED, close_drafts, drafts
from specverify.reference.draft import LanguageModel
from specverify.reference.tree import RankTree

CHAIN = RankTree((0, 0, 1, 2), (0, 0, 0, 0))
"""The tree of an engine that does not fill it: three tokens in a row, as engines draft by default."""


@st.composite
def vocabularies(draw: st.DrawFn, vocab: int) -> tuple[int, ...]:
    """The target ids that the draft can name: all (an empty tuple), or at least two of them."""
    if vocab < 4 or vocab > LISTED or draw(st.booleans()):
        return ()
    step = draw(st.integers(2, 3))
    # Every second or third id: most draft ids then differ from their target ids. The last id is always in.
    return tuple(sorted({*range(draw(st.integers(0, 1)), vocab, step), vocab - 1}))


@draws(LanguageModel.TAG)
@st.composite
def model_drafts(draw: st.DrawFn, setting: DraftSetting) -> LanguageModel:
    """A model, its tree, and its vocabulary; for an engine that fills no tree, a model near the target's."""
    if not setting.fills:
        return LanguageModel(draw(close_drafts(setting.model)), CHAIN)
    vocab = setting.model.vocab_size
    vocabulary = draw(vocabularies(vocab))
    named = len(vocabulary) or vocab
    shape = draw(trees(setting, named, static_trees(named)))
    model = draw(drafts(setting.model, setting.loading, setting.swarm.draft_traits))
    model = replace(model, quantised=draw(kinds_of_weights(setting)))
    return LanguageModel(model, shape, vocabulary)
