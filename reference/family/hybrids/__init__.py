"""Hybrids: families in which some layers have a recurrent state, not attention."""

from reference.family.hybrids.delta_rule import QWEN3_NEXT
from reference.family.hybrids.short_convolution import LFM2

__all__ = ["LFM2", "QWEN3_NEXT"]
