"""The transformers models of hybrids; see `specverify.reference.family.hybrids`."""

from specverify.backends.engine.model.family.hybrids.delta_rule import QWEN3_NEXT
from specverify.backends.engine.model.family.hybrids.short_convolution import LFM2
from specverify.backends.engine.model.family.hybrids.state_space import FALCON_H1

__all__ = ["FALCON_H1", "LFM2", "QWEN3_NEXT"]
