"""The MiMo-V2-Flash family, whose layers with a window have other numbers of heads, and sinks."""

from typing import Any

import transformers
from torch import nn

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.family.base import ModelFamily, equal_windows, layer_types
from specverify.backends.engine.model.family.experts import ExactGroupRouter, expert_counts, stack_experts
from specverify.backends.engine.model.float64_modules import ExactLayeredRotary, rms_norm
from specverify.reference.architecture import Architecture
from specverify.reference.family.mimo_v2_flash import MiMoV2FlashSettings


def _fields(arch: Architecture) -> dict[str, Any]:
    if arch.score_cap:
        raise Unsupported("mimo_v2_flash with a soft cap: transformers' attention with sinks has none")
    if arch.rope.kind != "default" or arch.output_bias:
        raise Unsupported("mimo_v2_flash with a variant of rotary embedding, or a bias behind attention")
    settings = MiMoV2FlashSettings.of(arch)
    share = arch.rotary_dim / arch.head_dim
    thetas = {"full_attention": arch.rope.theta, "sliding_attention": settings.local_theta or arch.rope.theta}
    return {
        **expert_counts(settings),
        "attention_bias": arch.qkv_bias,
        "layer_types": layer_types(arch),
        "mlp_layer_types": ["sparse" if settings.has_experts(layer) else "dense" for layer in range(arch.layers)],
        "sliding_window": max(arch.windows) or 1,  # transformers makes its mask even where no layer has a window
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}
            for kind, theta in thetas.items()
        },
        "v_head_dim": settings.value_dim,
        "attention_value_scale": settings.value_scale,
        "n_routed_experts": settings.experts,
        "n_group": settings.groups,
        "topk_group": settings.top_groups,
        "routed_scaling_factor": settings.routed_scale,
    }


def _prepare(network: Any) -> None:
    """Note the sizes of each layer for caches."""
    attentions = [layer.self_attn for layer in network.model.layers]
    network.heads_by_layer = tuple(
        (attention.k_proj.out_features // attention.head_dim, attention.head_dim, attention.v_head_dim)
        for attention in attentions
    )


def _exact_rotary(_: nn.Module, config: Any) -> nn.Module:
    return ExactLayeredRotary(config)


if hasattr(transformers, "MiMoV2FlashForCausalLM"):  # later than the oldest release that the engine runs on
    MIMO_V2_FLASH = ModelFamily(
        "mimo_v2_flash",
        transformers.MiMoV2FlashConfig,
        transformers.MiMoV2FlashForCausalLM,
        _fields,
        windows=equal_windows,
        arrange=stack_experts,
        prepare=_prepare,
        exact={
            "MiMoV2FlashRMSNorm": rms_norm("variance_epsilon"),
            "MiMoV2FlashRotaryEmbedding": _exact_rotary,
            "MiMoV2FlashTopkRouter": ExactGroupRouter,
        },
    )
