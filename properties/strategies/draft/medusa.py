"""Strategy for Medusa heads on built-in targets."""

from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.draft.drawing import DraftSetting, draws, kinds_of_weights
from specverify.properties.strategies.draft.head import SEEDS, head_trees, one_state
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft_trees import Expansion, outlines

SPARE_HEADS = 1
"""Most heads that a drawn tree does not reach."""


@draws(Medusa.TAG)
@st.composite
def medusa_heads(draw: st.DrawFn, setting: DraftSetting) -> Medusa:
    """Heads over a tree, with or without a bias; one in four scores with the target's own head, or has more blocks."""
    # A Medusa head stands no token beside its state.
    reads = replace(draw(one_state(setting.model.architecture.layers)), shift=0)
    shape = draw(head_trees(setting, setting.model.vocab_size))
    deepest = shape.depth if isinstance(shape, Expansion) else max(outline.height for outline in outlines(shape))
    heads = max(deepest, 1) + draw(st.integers(0, SPARE_HEADS))
    bias = draw(st.booleans())
    shared = draw(st.integers(0, 3)) == 3
    seed = draw(st.integers(0, SEEDS - 1))
    quantised = draw(kinds_of_weights(setting))
    layers = draw(st.sampled_from((1, 1, 1, 2)))
    return Medusa(shape, reads, heads, bias, shared, seed=seed, quantised=quantised, layers=layers)
