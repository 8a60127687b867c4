"""The families with experts: Mixtral, Qwen 2 MoE, Qwen 3 MoE, GLM-4 MoE.

transformers holds the matrices of all experts of a layer in two tensors, and computes the routers in float32.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.family.base import ModelFamily, equal_windows, layer_types, one_window
from specverify.backends.engine.model.float64_modules import rms_norm
from specverify.reference.architecture import Architecture
from specverify.reference.family.experts import Mixture

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def stack_experts(state: dict[str, Tensor], _: Architecture | None = None) -> dict[str, Tensor]:
    """The state dict with the matrices of all experts of a layer as one tensor, [experts, ...]."""
    arranged = dict[str, Tensor]()
    experts = dict[str, dict[tuple[str, int], Tensor]]()
    for name, tensor in state.items():
        expert = EXPERT.fullmatch(name)
        if expert is None:
            arranged[name] = tensor
        else:
            experts.setdefault(expert[1], {})[expert[3], int(expert[2])] = tensor
    for prefix, parts in experts.items():
        gate, up, down = (
            torch.stack([parts[kind, expert] for expert in range(len(parts) // 3)]) for kind in ("gate", "up", "down")
        )
        arranged |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], 1), f"{prefix}.down_proj": down}
    return arranged


class ExactRouter(nn.Module):
    """The router of Mixtral and Qwen in the dtype of its input: the softmax over all experts, then the largest."""

    def __init__(self, module: Any, config: Any) -> None:
        super().__init__()
        self.weight = module.weight
        self.top_k = module.top_k
        self.normed = getattr(module, "norm_topk_prob", True)  # Mixtral's class has no such choice

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The products [T, experts], and the weights and indices [T, k] of the chosen experts of `hidden` [..., H]."""
        products = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        weights, experts = products.softmax(-1).topk(self.top_k, dim=-1)
        return products, weights / weights.sum(-1, keepdim=True) if self.normed else weights, experts


class ExactGroupRouter(nn.Module):
    """The router of GLM-4 MoE in the dtype of its input: sigmoid scores and a bias, the best groups, then experts."""

    def __init__(self, module: Any, _: Any) -> None:
        super().__init__()
        self.weight = module.weight
        self.register_buffer("bias", module.e_score_correction_bias)
        self.top_k = module.top_k
        self.groups = module.num_group
        self.open = module.topk_group
        self.normed = module.norm_topk_prob
        self.factor = module.routed_scaling_factor

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `ExactRouter.forward`."""
        products = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        scores = products.sigmoid()
        grouped = (scores + self.bias).unflatten(-1, (self.groups, -1))
        best_groups = grouped.topk(2, dim=-1)[0].sum(-1).topk(self.open, dim=-1)[1]
        is_closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best_groups, False)
        experts = grouped.masked_fill(is_closed[..., None], float("-inf")).flatten(-2).topk(self.top_k, dim=-1)[1]
        weights = scores.gather(-1, experts)
        if self.normed:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return products, weights * self.factor, experts


def expert_counts(settings: Mixture) -> dict[str, Any]:
    """The fields on experts that several families call alike."""
    return {
        "num_experts_per_tok": settings.experts_per_token,
        "moe_intermediate_size": settings.expert_size,
        "norm_topk_prob": settings.norm_topk,
    }


def grouped_counts(settings: Mixture) -> dict[str, Any]:
    """The fields on groups of experts that GLM-4 MoE and DeepSeek call alike."""
    return {
        "n_routed_experts": settings.experts,
        "n_shared_experts": settings.shared_experts,
        "n_group": settings.groups,
        "topk_group": settings.top_groups,
        "first_k_dense_replace": settings.dense_layers,
        "routed_scaling_factor": settings.routed_scale,
    }


def _qwen(arch: Architecture) -> dict[str, Any]:
    settings = Mixture.of(arch)
    return {
        **expert_counts(settings),
        "num_experts": settings.experts,
        "decoder_sparse_step": settings.sparse_step,
        "mlp_only_layers": [],
        "use_sliding_window": any(arch.windows),
        "sliding_window": max(arch.windows) or None,
    }


def _qwen2(arch: Architecture) -> dict[str, Any]:
    shared = Mixture.of(arch).shared_size
    return {
        **_qwen(arch),
        "qkv_bias": arch.qkv_bias,
        "shared_expert_intermediate_size": shared,
        "layer_types": layer_types(arch),
    }


def _mixtral(arch: Architecture) -> dict[str, Any]:
    settings = Mixture.of(arch)
    return {
        "sliding_window": max(arch.windows) or None,
        "num_local_experts": settings.experts,
        "num_experts_per_tok": settings.experts_per_token,
    }


def _glm(arch: Architecture) -> dict[str, Any]:
    settings = Mixture.of(arch)
    if not settings.shared_experts:
        raise Unsupported("glm4_moe without a shared expert: transformers' model always has one")
    return {
        **expert_counts(settings),
        **grouped_counts(settings),
        "attention_bias": arch.qkv_bias,
        "use_qk_norm": arch.qk_norm,
    }


def _family(
    name: str,
    config: Any,
    model: Any,
    fields: Callable[[Architecture], dict[str, Any]],
    prefix: str,
    router: str,
    **checks: Any,
) -> ModelFamily:
    exact = ExactGroupRouter if name == "glm4_moe" else ExactRouter
    return ModelFamily(
        name,
        config,
        model,
        fields,
        arrange=stack_experts,
        exact={f"{prefix}RMSNorm": rms_norm("variance_epsilon"), f"{prefix}{router}": exact},
        **checks,
    )


MIXTRAL = _family("mixtral", MixtralConfig, MixtralForCausalLM, _mixtral, "Mixtral", "TopKRouter", windows=one_window)
QWEN2_MOE = _family(
    "qwen2_moe", Qwen2MoeConfig, Qwen2MoeForCausalLM, _qwen2, "Qwen2Moe", "TopKRouter", windows=equal_windows
)
QWEN3_MOE = _family(
    "qwen3_moe",
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    _qwen,
    "Qwen3Moe",
    "TopKRouter",
    windows=one_window,
    one_bias=True,
)
GLM4_MOE = _family("glm4_moe", Glm4MoeConfig, Glm4MoeForCausalLM, _glm, "Glm4Moe", "TopkRouter")
