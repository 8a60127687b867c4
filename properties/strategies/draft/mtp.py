"""Strategy for multi-token prediction modules on built-in targets."""

from hypothesis import strategies as st

from specverify.properties.strategies.draft.drawing import DraftSetting, draws, kinds_of_weights
from specverify.properties.strategies.draft.head import SEEDS, head_layers, head_trees, one_state
from specverify.reference.draft.mtp import Mtp

MODULES = 3
"""Most modules that are drawn."""

CONVENTIONS = ((False, False, False), (True, False, False), (False, True, False), (False, False, True))
"""Choices of the state fed back, the first embedding, and the projection's order: vLLM's, and each other one alone."""


@draws(Mtp.TAG)
@st.composite
def mtp_modules(draw: st.DrawFn, setting: DraftSetting) -> Mtp:
    """Modules, one to three, over a tree, in one of CONVENTIONS."""
    reads = draw(one_state(setting.model.architecture.layers))
    shape = draw(head_trees(setting, setting.model.vocab_size))
    layer = draw(head_layers())
    seed = draw(st.integers(0, SEEDS - 1))
    quantised = draw(kinds_of_weights(setting))
    return Mtp(
        shape,
        reads,
        layer,
        draw(st.integers(1, MODULES)),
        *draw(st.sampled_from(CONVENTIONS)),
        seed=seed,
        quantised=quantised,
    )
