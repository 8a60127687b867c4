"""Hybrids: families whose layers have a recurrent state, also beside attention."""

from specverify.reference.family.hybrids.delta_rule import QWEN3_NEXT
from specverify.reference.family.hybrids.short_convolution import LFM2
from specverify.reference.family.hybrids.state_space import FALCON_H1

__all__ = ["FALCON_H1", "LFM2", "QWEN3_NEXT"]
