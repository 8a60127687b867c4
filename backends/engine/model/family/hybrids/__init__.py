"""The transformers models of hybrids; see `reference.family.hybrids`."""

from backends.engine.model.family.hybrids.delta_rule import QWEN3_NEXT
from backends.engine.model.family.hybrids.short_convolution import LFM2

__all__ = ["LFM2", "QWEN3_NEXT"]
