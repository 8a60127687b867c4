"""The formulas of hybrids; see `specverify.reference.family.hybrids`."""

from specverify.reference.oracle.family.hybrids.delta_rule import QWEN3_NEXT
from specverify.reference.oracle.family.hybrids.short_convolution import LFM2
from specverify.reference.oracle.family.hybrids.state_space import FALCON_H1

__all__ = ["FALCON_H1", "LFM2", "QWEN3_NEXT"]
