"""Strategy for EAGLE-3 heads on built-in targets."""

from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.draft.drawing import DraftSetting, draws, kinds_of_weights
from specverify.properties.strategies.draft.head import (
    SEEDS,
    head_layers,
    head_trees,
    likely_vocabularies,
    several_states,
)
from specverify.reference.draft.eagle3 import Eagle3

HIDDEN_SIZE = 10
"""The width of rows that are not as wide as the target's; no built-in target has it."""


@draws(Eagle3.TAG)
@st.composite
def eagle3_heads(draw: st.DrawFn, setting: DraftSetting) -> Eagle3:
    """A head over a tree, mostly with a reduced vocabulary; one in four has a flag of newer heads, or more layers.

    One in eight has rows of another width than its target's, and embeddings of its own.
    """
    reads = draw(several_states(setting.model.architecture.layers))
    vocabulary = draw(likely_vocabularies(setting))
    shape = draw(head_trees(setting, len(vocabulary) or setting.model.vocab_size))
    before, output = draw(st.sampled_from(((False, False), (False, False), (True, False), (False, True))))
    layer = draw(head_layers())
    seed = draw(st.integers(0, SEEDS - 1))
    layers = draw(st.sampled_from((1, 1, 1, 1, 1, 1, 2, 3)))
    quantised = draw(kinds_of_weights(setting))
    hidden_size = draw(st.sampled_from((*(0,) * 7, HIDDEN_SIZE)))
    head = Eagle3(shape, reads, layer, vocabulary, before, output, layers, hidden_size)
    return replace(head, seed=seed, quantised=quantised)
