"""Strategy for EAGLE-1 heads on built-in targets."""

from hypothesis import strategies as st

from specverify.properties.strategies.draft.drawing import DraftSetting, draws, kinds_of_weights
from specverify.properties.strategies.draft.head import SEEDS, head_layers, head_trees, one_state
from specverify.reference.draft.eagle1 import Eagle1


@draws(Eagle1.TAG)
@st.composite
def eagle1_heads(draw: st.DrawFn, setting: DraftSetting) -> Eagle1:
    """A head over a tree, with or without a bias."""
    reads = draw(one_state(setting.model.architecture.layers))
    shape = draw(head_trees(setting, setting.model.vocab_size))
    layer = draw(head_layers())
    seed = draw(st.integers(0, SEEDS - 1))
    quantised = draw(kinds_of_weights(setting))
    return Eagle1(shape, reads, layer, draw(st.booleans()), seed=seed, quantised=quantised)
