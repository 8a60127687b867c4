"""Strategy for EAGLE-1 heads on built-in targets."""

from hypothesis import strategies as st

from specverify.properties.strategies.draft.drawing import DraftSetting, draws, kinds_of_weights
from specverify.properties.strategies.draft.head import SEEDS, head_layers, head_trees, one_state
from specverify.reference.draft.eagle1 import Eagle1

MOST_LAYERS = 3
"""Most decoder layers that are drawn."""

EXPERTS = ((0, 1), (0, 1), (2, 1), (4, 1), (4, 2))
"""Numbers of experts of a layer and of those that a row goes through; 0 for a gated block."""


@draws(Eagle1.TAG)
@st.composite
def eagle1_heads(draw: st.DrawFn, setting: DraftSetting) -> Eagle1:
    """A head over a tree: with or without a bias, further layers, layers without rotary embedding, and experts."""
    reads = draw(one_state(setting.model.architecture.layers))
    shape = draw(head_trees(setting, setting.model.vocab_size))
    layer = draw(head_layers())
    seed = draw(st.integers(0, SEEDS - 1))
    quantised = draw(kinds_of_weights(setting))
    bias = draw(st.booleans())
    layers = draw(st.sampled_from((1, 1, 2, MOST_LAYERS)))
    unrotated = tuple(number for number in range(layers) if draw(st.integers(0, 2)) == 2)
    experts, experts_per_token = draw(st.sampled_from(EXPERTS))
    return Eagle1(
        shape,
        reads,
        layer,
        bias,
        layers,
        unrotated,
        experts,
        experts_per_token,
        seed=seed,
        quantised=quantised,
    )
