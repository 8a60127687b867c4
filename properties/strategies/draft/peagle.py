"""Strategy for P-EAGLE heads on built-in targets."""

from dataclasses import fields

from hypothesis import strategies as st

from specverify.properties.strategies.draft.drawing import DraftSetting, draws
from specverify.properties.strategies.draft.eagle3 import eagle3_heads
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.peagle import PEagle

SPARE_MASKS = 2
"""Most mask tokens that a drawn tree does not reach."""


@draws(PEagle.TAG)
@st.composite
def peagle_heads(draw: st.DrawFn, setting: DraftSetting) -> PEagle:
    """An EAGLE-3 head, with any mask token and as many of them as its tree needs, or some more."""
    head = draw(eagle3_heads(setting))
    deepest = head.height if head.expansion is None else head.expansion.depth
    slots = max(deepest - 1, 1) + draw(st.integers(0, SPARE_MASKS))
    mask_token = draw(st.integers(0, setting.model.vocab_size - 1))
    values = {field.name: getattr(head, field.name) for field in fields(Eagle3)}
    return PEagle(**values, mask_slots=slots, mask_token=mask_token)
