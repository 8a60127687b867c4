"""The ERNIE 4.5 families, dense and with experts."""

from typing import Any

from torch import Tensor, nn
from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM, Ernie4_5Config, Ernie4_5ForCausalLM

from specverify.backends.engine.model.family.base import ModelFamily, refuse_unequal
from specverify.backends.engine.model.family.experts import stack_experts
from specverify.backends.engine.model.float64_modules import rms_norm, unrounded
from specverify.reference.architecture import Architecture
from specverify.reference.family.ernie4_5 import Ernie45MoeSettings


class ExactCorrectedRouter(nn.Module):
    """The router in the dtype of its input: the softmax over all experts, plus a bias, chooses the largest."""

    def __init__(self, module: Any, _: Any) -> None:
        super().__init__()
        self.weight = module.weight
        self.moe_statics = module.moe_statics
        self.top_k = module.top_k
        self.norm_min = module.norm_min

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The products [T, experts], and the weights and indices [T, k] of the chosen experts of `hidden` [T, H]."""
        # transformers holds these two in float32 whatever the working dtype.
        products = hidden @ self.weight.to(hidden.dtype).T
        shares = products.softmax(-1)
        bias = self.moe_statics.e_score_correction_bias[0].to(hidden.dtype)
        experts = (shares + bias).topk(self.top_k, dim=-1)[1]
        weights = shares.gather(-1, experts)
        return products, weights / weights.sum(-1, keepdim=True).clamp(min=self.norm_min), experts


def _dense_fields(arch: Architecture) -> dict[str, Any]:
    refuse_unequal(arch, "qkv_bias, output_bias and mlp_bias", arch.qkv_bias, arch.output_bias, arch.mlp_bias)
    return {"use_bias": arch.qkv_bias}


def _moe_fields(arch: Architecture) -> dict[str, Any]:
    settings = Ernie45MoeSettings.of(arch)
    return {
        "use_bias": False,
        "moe_num_experts": settings.experts,
        "moe_k": settings.experts_per_token,
        "moe_intermediate_size": settings.expert_size,
        "moe_num_shared_experts": settings.shared_experts,
        "moe_layer_start_index": settings.dense_layers,
        "moe_layer_end_index": settings.end_layer - 1,
        "moe_layer_interval": settings.sparse_step,
        "moe_norm_min": settings.norm_min,
    }


def _arrange(state: dict[str, Tensor], arch: Architecture) -> dict[str, Tensor]:
    """The state dict with stacked experts, and correction biases as rows of one."""
    stacked = stack_experts(state, arch)
    return {
        name.replace(".gate.e_score", ".gate.moe_statics.e_score"): tensor[None] if "e_score" in name else tensor
        for name, tensor in stacked.items()
    }


ERNIE4_5 = ModelFamily(
    "ernie4_5",
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    _dense_fields,
    exact={"Ernie4_5RMSNorm": rms_norm("variance_epsilon"), "Ernie4_5Attention": unrounded},
)

ERNIE4_5_MOE = ModelFamily(
    "ernie4_5_moe",
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    _moe_fields,
    arrange=_arrange,
    exact={
        "Ernie4_5_MoeRMSNorm": rms_norm("variance_epsilon"),
        "Ernie4_5_MoeAttention": unrounded,
        "Ernie4_5_MoeTopKRouter": ExactCorrectedRouter,
    },
)
