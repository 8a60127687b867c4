"""The MiniMax-M2 family."""

from typing import Any

import transformers
from torch import Tensor, nn

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.family.base import ModelFamily
from specverify.backends.engine.model.family.experts import stack_experts
from specverify.backends.engine.model.float64_modules import rms_norm
from specverify.reference.architecture import Architecture
from specverify.reference.family.minimax_m2 import MiniMaxM2Settings


class ExactBiasedRouter(nn.Module):
    """The router in the dtype of its input: sigmoids plus a bias choose the largest, and sigmoids weigh."""

    def __init__(self, module: Any, _: Any) -> None:
        super().__init__()
        self.weight = module.weight
        self.top_k = module.top_k

    def forward(self, hidden: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The products [T, experts], and the weights and indices [T, k] of the chosen experts of `hidden` [..., H]."""
        products = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        shares = products.sigmoid()
        experts = (shares + bias.to(shares.dtype)).topk(self.top_k, dim=-1)[1]
        weights = shares.gather(-1, experts)
        return products, weights / weights.sum(-1, keepdim=True), experts


def _fields(arch: Architecture) -> dict[str, Any]:
    if not arch.qk_norm:
        raise Unsupported("minimax_m2 without norms of queries and keys: transformers' model always has them")
    settings = MiniMaxM2Settings.of(arch)
    return {"num_local_experts": settings.experts, "num_experts_per_tok": settings.experts_per_token}


if hasattr(transformers, "MiniMaxM2ForCausalLM"):  # later than the oldest release that the engine runs on
    MINIMAX_M2 = ModelFamily(
        "minimax_m2",
        transformers.MiniMaxM2Config,
        transformers.MiniMaxM2ForCausalLM,
        _fields,
        rename=lambda name: name.replace(".gate.e_score", ".e_score"),
        arrange=stack_experts,
        exact={"MiniMaxM2RMSNorm": rms_norm("variance_epsilon"), "MiniMaxM2TopKRouter": ExactBiasedRouter},
    )
