"""The Llama 4 families, text model only: with dense layers, and with experts.

The engine changes transformers' model in two ways. The temperature of queries follows from logical positions, and in
float64 the rotary embedding is computed in float64.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Llama4ForCausalLM, Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4Router, Llama4TextAttention

from specverify.backends.engine.attention.interface import through_interface
from specverify.backends.engine.law_device import why_no_float64
from specverify.backends.engine.model.family.base import ModelFamily, accept_all, refuse_unequal
from specverify.backends.engine.model.family.experts import stack_experts
from specverify.backends.engine.model.float64_modules import ExactComplexRotary, rms_norm
from specverify.reference.architecture import Architecture
from specverify.reference.family.llama4 import Llama4TextSettings


@dataclass(frozen=True)
class Temperature:
    """The attention temperature of a layer without rotary embedding, a factor of its queries (arXiv 2501.19399)."""

    floor_scale: int
    attn_scale: float

    def __call__(self, query: Tensor, positions: Tensor) -> Tensor:
        """Return `query` [B, H, T, D] with each row scaled by its position; `positions` is int64 [B, T]."""
        exact_dtype = torch.float64 if why_no_float64(positions.device) is None else torch.float32
        scale = 1 + self.attn_scale * torch.log1p(torch.floor((positions.to(exact_dtype) + 1) / self.floor_scale))
        wide_dtype = torch.promote_types(query.dtype, torch.float32)
        return (query * scale.to(wide_dtype)[:, None, :, None]).to(query.dtype)


def temper_logically(network: Any) -> None:
    """Change a Llama 4 model, in place, so that its temperature follows from position ids.

    transformers 5.23 computes the temperature from the index of the row in cache and forward. For rows of a tree that
    index differs from the position, except on the tree's first path, and for padded rows too. So transformers' own
    tuning is switched off. The decoder layer passes the positions on to the engine's attention interface, which scales
    the queries.
    """
    for layer in network.model.layers:
        attention = layer.self_attn
        if attention.attn_temperature_tuning and not attention.use_rope:
            attention.attn_temperature_tuning = False
            attention.temperature = Temperature(attention.floor_scale, attention.attn_scale)
            layer.register_forward_pre_hook(_hand_down, with_kwargs=True)


def _hand_down(
    _: nn.Module, args: tuple[Any, ...], named_arguments: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**named_arguments, "logical": named_arguments["position_ids"]}


class ExactAttention(Llama4TextAttention):  # type: ignore[misc]  # transformers is untyped here
    """Llama 4's attention without a step in float32; transformers' own rotates queries and keys in float32."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor,
        attention_mask: Tensor,
        past_key_values: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute transformers' `forward`, with `position_embeddings` complex128 [B, T, head_dim / 2]."""
        rows = hidden_states.shape[:-1]
        query, key, value = (
            project(hidden_states).view(*rows, -1, self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.use_rope:
            query, key = (_rotate(tensor, position_embeddings) for tensor in (query, key))
            if hasattr(self, "qk_norm"):
                query, key = self.qk_norm(query), self.qk_norm(key)
        key, value = past_key_values.update(key.transpose(1, 2), value.transpose(1, 2), self.layer_idx)
        output, _ = through_interface(
            self, query.transpose(1, 2), key, value, attention_mask, scaling=self.scaling, **kwargs
        )
        return self.o_proj(output.reshape(*rows, -1)), None


def _rotate(x: Tensor, frequencies: Tensor) -> Tensor:
    """`x` [B, T, heads, head_dim], rotated; each pair of neighbouring dimensions is one complex number."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * frequencies[:, :, None]).flatten(3)


def _exact_attention(module: nn.Module, _: Any) -> nn.Module:
    module.__class__ = ExactAttention  # the weights and settings of the module stay
    return module


class ExactRouter(Llama4Router):  # type: ignore[misc]  # transformers is untyped here
    """Llama 4's router without a step in float32: the sigmoid of the best scores, 0 for the other experts."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors and the scores of all experts of `hidden_states` [T, H], both [T, experts]."""
        scores = hidden_states @ self.weight.T
        best_experts = scores.topk(self.top_k, dim=1)[1]
        return torch.zeros_like(scores).scatter(1, best_experts, scores.gather(1, best_experts).sigmoid()), scores


def _exact_router(module: nn.Module, _: Any) -> nn.Module:
    module.__class__ = ExactRouter
    return module


def _fields(arch: Architecture) -> dict[str, Any]:
    """The fields of Llama 4's config that other families lack, for a model without experts."""
    refuse_unequal(arch, "chunks in all layers that have one", *filter(None, arch.chunks))
    return {
        "moe_layers": [],
        "intermediate_size_mlp": arch.intermediate_size,
        "use_qk_norm": arch.qk_norm,
        "no_rope_layers": [int(layer not in arch.unrotated) for layer in range(arch.layers)],
        # transformers makes its mask even where no layer has a chunk.
        "attention_chunk_size": max(arch.chunks, default=0) or arch.max_positions,
        "layer_types": ["chunked_attention" if chunk else "full_attention" for _, chunk in arch.reaches],
        "attn_temperature_tuning": arch.floor_scale > 0,
        "floor_scale": arch.floor_scale or 1,
        "attn_scale": arch.attn_scale,
    }


def _text_fields(arch: Architecture) -> dict[str, Any]:
    """The fields of Llama 4's config that other families lack; `intermediate_size` is that of experts."""
    settings = Llama4TextSettings.of(arch)
    return {
        **_fields(arch),
        "moe_layers": [layer for layer in range(arch.layers) if settings.has_experts(layer)],
        "intermediate_size": settings.expert_size,
        "num_local_experts": settings.experts,
        "num_experts_per_tok": settings.experts_per_token,
    }


def _rename(name: str) -> str:
    return name.replace(".mlp.gate.", ".mlp.router.").replace(".mlp.", ".feed_forward.")


def _arrange(state: dict[str, Tensor], arch: Architecture) -> dict[str, Tensor]:
    """The state dict with all experts of a layer in two tensors, inputs first."""
    stacked_names = (".experts.gate_up_proj", ".experts.down_proj")
    return {
        name: tensor.transpose(1, 2).contiguous() if name.endswith(stacked_names) else tensor
        for name, tensor in stack_experts(state, arch).items()
    }


EXACT = {
    "Llama4TextRMSNorm": rms_norm("eps"),
    "Llama4TextL2Norm": rms_norm("eps"),
    "Llama4TextRotaryEmbedding": lambda _, config: ExactComplexRotary(config),
    "Llama4TextAttention": _exact_attention,
    "Llama4Router": _exact_router,
}

LLAMA4 = ModelFamily(
    "llama4",
    Llama4TextConfig,
    Llama4ForCausalLM,
    _fields,
    irope=accept_all,
    one_bias=True,
    rename=_rename,
    prepare=temper_logically,
    exact=EXACT,
)
LLAMA4_TEXT = ModelFamily(
    "llama4_text",
    Llama4TextConfig,
    Llama4ForCausalLM,
    _text_fields,
    irope=accept_all,
    one_bias=True,
    rename=_rename,
    arrange=_arrange,
    prepare=temper_logically,
    exact=EXACT,
)
