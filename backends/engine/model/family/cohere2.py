"""The Cohere 2 family, whose attention and feed-forward blocks stand side by side."""

from typing import Any

from torch import nn
from transformers import Cohere2Config, Cohere2ForCausalLM

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.family.base import ModelFamily, equal_windows, layer_types, no_chunks
from specverify.backends.engine.model.float64_modules import ExactNeighbourRotary, layer_norm, unrounded
from specverify.reference.architecture import Architecture
from specverify.reference.family.cohere2 import Cohere2Settings


def _fields(arch: Architecture) -> dict[str, Any]:
    bare = tuple(layer for layer, window in enumerate(arch.windows) if not window)
    if arch.unrotated != bare:
        raise Unsupported("cohere2: exactly the layers without a window lack rotary embedding")
    return {
        "layer_types": layer_types(arch),
        "sliding_window": max(arch.windows) or 1,  # transformers makes its mask even where no layer has a window
        "layer_norm_eps": arch.norm_eps,
        "logit_scale": Cohere2Settings.of(arch).logit_scale,
    }


def _exact_rotary(_: nn.Module, config: Any) -> nn.Module:
    return ExactNeighbourRotary(config)


COHERE2 = ModelFamily(
    "cohere2",
    Cohere2Config,
    Cohere2ForCausalLM,
    _fields,
    windows=equal_windows,
    irope=no_chunks,
    one_bias=True,
    exact={
        "Cohere2LayerNorm": layer_norm,
        "Cohere2RotaryEmbedding": _exact_rotary,
        "Cohere2Attention": unrounded,
    },
)
