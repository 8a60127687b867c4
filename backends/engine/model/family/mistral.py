"""The Mistral and Ministral 3 families, with one window for all layers or none.

In float64 the scale of Ministral 3's queries follows from positions in float64, in place of transformers' own in
float32.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Ministral3Config, Ministral3ForCausalLM, MistralConfig, MistralForCausalLM

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.family.base import ModelFamily, one_window, rope_of
from specverify.backends.engine.model.float64_modules import rms_norm
from specverify.reference.architecture import Architecture
from specverify.reference.family.dense import Ministral3Settings


def _fields(arch: Architecture) -> dict[str, Any]:
    return {"sliding_window": max(arch.windows) or None}


MISTRAL = ModelFamily(
    "mistral",
    MistralConfig,
    MistralForCausalLM,
    _fields,
    windows=one_window,
    exact={"MistralRMSNorm": rms_norm("variance_epsilon")},
)

BETA = "llama_4_scaling_beta"


def _ministral3(arch: Architecture) -> dict[str, Any]:
    settings = Ministral3Settings.of(arch)
    beta, original = settings.scale_beta, settings.scale_original
    if beta and not (arch.rope.original or original):
        raise Unsupported("ministral3 with scaled queries and no original context: its rotary embedding has none")
    if arch.rope.original and original not in (0, arch.rope.original):
        raise Unsupported("ministral3 with two original contexts: transformers' model has one number for both")
    # transformers divides positions by the original context even where the scale is 0.
    rope = {"original_max_position_embeddings": original or 1, **rope_of(arch), BETA: beta}
    return {**_fields(arch), "rope_parameters": rope}


@dataclass(frozen=True)
class Scale:
    """The factor 1 + beta * ln(1 + floor(position / original)) of queries, in float64."""

    beta: float
    original: int

    def __call__(self, query: Tensor, positions: Tensor) -> Tensor:
        """Return `query` [B, H, T, D] with each row scaled by its position; `positions` is int64 [B, T]."""
        scale = 1 + self.beta * torch.log1p((positions // self.original).double())
        return query * scale[:, None, :, None]


def _exact_scale(module: nn.Module, config: Any) -> nn.Module:
    rope = config.rope_parameters
    attention = cast(Any, module)
    attention.temperature = Scale(float(rope.get(BETA) or 0), rope.get("original_max_position_embeddings") or 1)
    # transformers' own factor is 1 now, whose float32 rounds nothing. Each layer needs the beta, hence a copy.
    attention.config = _UnscaledConfig(config)
    return module


class _UnscaledConfig:
    """A config whose `rope_parameters` scale no queries; all other fields are those of `config`."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.rope_parameters = {**config.rope_parameters, BETA: 0.0}

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # a copy is asked for its methods before it has any field
            raise AttributeError(name)
        return getattr(self._config, name)


MINISTRAL3 = ModelFamily(
    "ministral3",
    Ministral3Config,
    Ministral3ForCausalLM,
    _ministral3,
    windows=one_window,
    exact={"Ministral3RMSNorm": rms_norm("variance_epsilon"), "Ministral3Attention": _exact_scale},
)
