"""DeepSeek-V2, DeepSeek-V3 and Kimi K2: latent attention (MLA), and experts.

transformers 5.23 hands its cache latent vectors and rotated parts, and expands them to keys and values after every
read. The engine's caches hold either, as the case's layout says: `LatentRowsCache` stands between. Attention over
latent rows is that of `specverify.backends.engine.attention.latent`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention

from specverify.backends.base import Unsupported
from specverify.backends.engine.attention.interface import through_interface
from specverify.backends.engine.attention.latent import Absorption
from specverify.backends.engine.model.family.base import ModelFamily, rope_parameters
from specverify.backends.engine.model.family.experts import (
    ExactGroupRouter,
    expert_counts,
    grouped_counts,
    stack_experts,
)
from specverify.backends.engine.model.float64_modules import ExactComplexRotary, rms_norm
from specverify.reference.architecture import Architecture
from specverify.reference.family.latent import DeepseekV3Settings, Latent


class LatentRowsCache:
    """The cache argument of one layer's attention: caches the latent rows that it is handed, or expands them."""

    def __init__(self, module: Any, lanes: Any) -> None:
        self.module = module
        self.lanes = lanes

    def update(self, latent: Tensor, rotated: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write this forward's rows, [B, 1, T, rank] and [B, 1, T, rotary_dim]; return the columns of the cache."""
        if self.lanes.latent:
            return self.lanes.update(latent, rotated, layer)  # type: ignore[no-any-return]
        key, value = type(self.module).expand_kv(self.module, latent, rotated)
        columns: tuple[Tensor, Tensor] = self.lanes.update(key, value, layer)
        return columns


def cache_latent_rows(network: Any) -> None:
    """Change a model with latent attention, in place, so that its caches are updated through `LatentRowsCache`."""
    for layer in network.model.layers:
        layer.self_attn.expand_kv = _unchanged
        layer.self_attn.absorbed = Absorption(layer.self_attn)
        layer.self_attn.register_forward_pre_hook(_hand_over, with_kwargs=True)


def _unchanged(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return key, value


def _hand_over(
    module: nn.Module, args: tuple[Any, ...], named_arguments: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**named_arguments, "past_key_values": LatentRowsCache(module, named_arguments["past_key_values"])}


class ExactAttention(DeepseekV2Attention):  # type: ignore[misc]  # transformers is untyped here
    """DeepSeek-V2's attention without a step in float32; transformers' own rotates queries and keys in float32."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        past_key_values: Any,
        position_embeddings: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute transformers' `forward`, with `position_embeddings` complex128 [B, T, rotary_dim / 2]."""
        rows = hidden_states.shape[:-1]
        if self.q_lora_rank is None:
            query = self.q_proj(hidden_states)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.view(*rows, -1, self.qk_head_dim).transpose(1, 2)
        plain, turning = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        latent, rotated = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        latent = self.kv_a_layernorm(latent)[:, None]
        turning, rotated = (_rotate(part, position_embeddings) for part in (turning, rotated[:, None]))
        key, value = past_key_values.update(latent, rotated, self.layer_idx)
        key, value = self.expand_kv(key, value)
        output, _ = through_interface(
            self, torch.cat((plain, turning), -1), key, value, attention_mask, scaling=self.scaling, **kwargs
        )
        return self.o_proj(output.reshape(*rows, -1)), None


def _rotate(x: Tensor, frequencies: Tensor) -> Tensor:
    """`x` [B, heads, T, rotary_dim], rotated; each pair of neighbouring dimensions is one complex number."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * frequencies[:, None]).flatten(3)


def _exact_attention(module: nn.Module, _: Any) -> nn.Module:
    module.__class__ = ExactAttention  # the weights and settings of the module stay, and so do its hooks
    return module


class ExactSoftmaxRouter(nn.Module):
    """The router of DeepSeek-V2 in the dtype of its input: the softmax over all experts, the best groups, experts."""

    def __init__(self, module: Any, _: Any) -> None:
        super().__init__()
        self.weight = module.weight
        self.top_k = module.top_k
        self.factor = module.routed_scaling_factor
        grouped = module.topk_method == "group_limited_greedy"
        self.groups: int = module.num_group if grouped else 1
        self.open: int = module.topk_group if grouped else 1

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The products [T, experts], and the weights and indices [T, k] of the chosen experts of `hidden` [..., H]."""
        products = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        grouped = products.softmax(-1).unflatten(-1, (self.groups, -1))
        best_groups = grouped.amax(-1).topk(self.open, dim=-1)[1]
        is_closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best_groups, False)
        weights, experts = grouped.masked_fill(is_closed[..., None], 0.0).flatten(-2).topk(self.top_k, dim=-1)
        return products, weights * self.factor, experts


def _fields(arch: Architecture) -> dict[str, Any]:
    if arch.mlp_bias:
        raise Unsupported(f"{arch.family} with biases in its feed-forward blocks: transformers' experts have none")
    settings = Latent.of(arch)
    if not settings.shared_experts:
        raise Unsupported(f"{arch.family} without a shared expert: transformers' model always has one")
    rope = rope_parameters(arch.rope)
    if arch.rope.kind == "dynamic" and arch.rotary_dim == 2:
        raise Unsupported(f"{arch.family} with 2 dimensions turned by dynamic: transformers divides by these less 2")
    if arch.rope.kind != "default" and arch.rope.mscale_all_dim:
        if arch.rope.kind == "longrope":
            raise Unsupported(f"{arch.family} with longrope and mscale_all_dim: whose factor transformers lacks")
        rope["mscale_all_dim"] = arch.rope.mscale_all_dim
    rotated = int(arch.rotary_dim)
    return {
        **expert_counts(settings),
        "head_dim": rotated,
        "rope_parameters": rope,
        "q_lora_rank": settings.query_rank or None,
        "kv_lora_rank": settings.latent_rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": arch.head_dim - rotated,
        "v_head_dim": arch.value_dim,
        **grouped_counts(settings),
    }


def _v3(arch: Architecture) -> dict[str, Any]:
    return {**_fields(arch), "rope_interleave": DeepseekV3Settings.of(arch).interleaved}


def _v2(arch: Architecture) -> dict[str, Any]:
    settings = Latent.of(arch)
    if settings.latent_rank % 2 or arch.head_dim % 2:
        raise Unsupported(f"{arch.family} with an odd latent rank or head: transformers turns pairs in place")
    return {**_fields(arch), "topk_method": "group_limited_greedy" if settings.groups > 1 else "greedy"}


def _kimi(content: dict[str, Any]) -> Any:
    """The config for the config.json `content` of Kimi K2, whose own code is DeepSeek-V3's."""
    left_out = ("model_type", "auto_map", "architectures")
    return DeepseekV3Config(**{key: value for key, value in content.items() if key not in left_out})


DEEPSEEK_V3 = ModelFamily(
    "deepseek_v3",
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    _v3,
    one_bias=True,
    arrange=stack_experts,
    prepare=cache_latent_rows,
    exact={"DeepseekV3RMSNorm": rms_norm("variance_epsilon"), "DeepseekV3TopkRouter": ExactGroupRouter},
    checkpoint={"kimi_k2": _kimi},
)
DEEPSEEK_V2 = ModelFamily(
    "deepseek_v2",
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    _v2,
    one_bias=True,
    arrange=stack_experts,
    prepare=cache_latent_rows,
    exact={
        "DeepseekV2RMSNorm": rms_norm("variance_epsilon"),
        "DeepseekV2TopkRouter": ExactSoftmaxRouter,
        "DeepseekV2RotaryEmbedding": lambda _, config: ExactComplexRotary(config),
        "DeepseekV2Attention": _exact_attention,
    },
)
