"""The formulas of hybrids; see `reference.family.hybrids`."""

from reference.oracle.family.hybrids.delta_rule import QWEN3_NEXT
from reference.oracle.family.hybrids.short_convolution import LFM2

__all__ = ["LFM2", "QWEN3_NEXT"]
