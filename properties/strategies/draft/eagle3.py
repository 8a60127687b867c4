"""Strategy for EAGLE-3 heads on built-in targets."""

from hypothesis import strategies as st

from properties.strategies.draft.drawing import Given, draws, kinds_of_weights
from properties.strategies.draft.head import SEEDS, head_layers, head_trees, likely_vocabularies, several_states
from reference.draft.eagle3 import Eagle3


@draws(Eagle3.TAG)
@st.composite
def eagle3_heads(draw: st.DrawFn, given: Given) -> Eagle3:
    """A head over a tree, mostly with a reduced vocabulary; one in four has a flag of newer heads, or more layers."""
    reads = draw(several_states(given.model.architecture.layers))
    vocabulary = draw(likely_vocabularies(given))
    shape = draw(head_trees(given, len(vocabulary) or given.model.vocab_size))
    before, output = draw(st.sampled_from(((False, False), (False, False), (True, False), (False, True))))
    layer, seed = draw(head_layers()), draw(st.integers(0, SEEDS - 1))
    layers = draw(st.sampled_from((1, 1, 1, 1, 1, 1, 2, 3)))
    quantised = draw(kinds_of_weights(given))
    return Eagle3(shape, reads, layer, vocabulary, before, output, layers, seed=seed, quantised=quantised)
