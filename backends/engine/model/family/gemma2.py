"""The Gemma 2 family.

Its transformers model applies soft caps to scores and logits, and its norms multiply by one plus their weight.
transformers multiplies the embeddings by a float32 buffer that no checkpoint holds. A model made without weights lacks
this buffer, and a float64 model needs it in float64.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.family.base import ModelFamily, equal_windows, layer_types
from specverify.backends.engine.model.float64_modules import rms_norm
from specverify.reference.architecture import Architecture
from specverify.reference.family.gemma2 import Gemma2Settings


def fields_of(arch: Architecture) -> dict[str, Any]:
    """The fields of the config that not all families have; see `ModelFamily.fields`."""
    settings = Gemma2Settings.of(arch)
    scalar = settings.query_scalar or arch.head_dim
    if scalar != int(scalar):
        raise Unsupported(
            f"{arch.family} with a query_scalar of {scalar}: transformers' config holds whole numbers alone"
        )
    return {
        "layer_types": layer_types(arch),
        "sliding_window": max(arch.windows) or 1,  # transformers makes its mask even where no layer has a window
        "query_pre_attn_scalar": int(scalar),
        "attn_logit_softcapping": arch.score_cap or None,
        "final_logit_softcapping": settings.logit_cap or None,
    }


def with_exact_scale(module: nn.Module, config: Any) -> nn.Module:
    """Give the embeddings their factor, rounded once to the dtype of the weights; transformers' own is of float32."""
    dtype = next(module.parameters()).dtype
    module.embed_scale = torch.tensor(math.sqrt(config.hidden_size), dtype=torch.float64).to(dtype)
    return module


def complete(network: Any) -> None:
    """Give the embeddings of a built-in model the factor that no state dict holds."""
    with_exact_scale(network.model.embed_tokens, network.config)


GEMMA2 = ModelFamily(
    "gemma2",
    Gemma2Config,
    Gemma2ForCausalLM,
    fields_of,
    windows=equal_windows,
    one_bias=True,
    caps_scores=True,
    complete=complete,
    exact={"Gemma2RMSNorm": rms_norm("eps", offset=1.0), "Gemma2TextScaledWordEmbedding": with_exact_scale},
)
