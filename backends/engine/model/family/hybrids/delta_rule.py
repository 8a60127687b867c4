"""Qwen3-Next: gated delta rule in most layers, gated attention in the others."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.family.base import ModelFamily, no_irope, no_window, refuse_unequal
from specverify.backends.engine.model.family.experts import ExactRouter, stack_experts
from specverify.backends.engine.model.float64_modules import rms_norm
from specverify.backends.engine.model.recurrent.delta_net import over_trees
from specverify.reference.architecture import Architecture


def _fields(arch: Architecture) -> dict[str, Any]:
    """The fields of the config that other families lack."""
    no_irope(arch)
    no_window(arch)
    refuse_unequal(arch, "qkv_bias and output_bias", arch.qkv_bias, arch.output_bias)
    if not arch.qk_norm:
        raise Unsupported("qwen3_next without norms of queries and keys: transformers' model always has them")
    kinds = ("full_attention", "linear_attention")
    return {
        "attention_bias": arch.qkv_bias,
        "layer_types": [kinds[layer in arch.recurrent] for layer in range(arch.layers)],
        "linear_num_key_heads": int(arch.setting("key_heads")),
        "linear_num_value_heads": int(arch.setting("value_heads")),
        "linear_key_head_dim": int(arch.setting("key_width")),
        "linear_value_head_dim": int(arch.setting("value_width")),
        "linear_conv_kernel_dim": int(arch.setting("conv_width")),
        "num_experts": int(arch.setting("experts")),
        "num_experts_per_tok": int(arch.setting("experts_per_token")),
        "moe_intermediate_size": int(arch.setting("expert_size")),
        "shared_expert_intermediate_size": int(arch.setting("shared_size")),
        "norm_topk_prob": bool(arch.setting("norm_topk")),
        "decoder_sparse_step": int(arch.setting("sparse_step")),
        "mlp_only_layers": [],
    }


class ExactGatedNorm(nn.Module):
    """The norm behind the delta rule in the dtype of its input: the normed row, its weight, and silu of the gate."""

    def __init__(self, module: Any, _: Any) -> None:
        super().__init__()
        self.weight = module.weight
        self.eps = module.variance_epsilon

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        """Return `hidden` [..., width], normed, times weight and silu of `gate` [..., width]."""
        normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)
        scaled: Tensor = self.weight * normed * nn.functional.silu(gate)
        return scaled


QWEN3_NEXT = ModelFamily(
    "qwen3_next",
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    _fields,
    rename=lambda name: name.replace(".linear_attn.gain", ".linear_attn.norm.weight"),
    arrange=stack_experts,
    prepare=over_trees,
    exact={
        "Qwen3NextRMSNorm": rms_norm("eps", offset=1.0),
        "Qwen3NextRMSNormGated": ExactGatedNorm,
        "Qwen3NextTopKRouter": ExactRouter,
    },
)
