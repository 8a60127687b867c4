"""Qwen3.5, dense and with experts: the layers of Qwen3-Next behind other projections."""

from typing import Any

import transformers
from torch import Tensor, nn

from specverify.backends.engine.model.family.base import ModelFamily
from specverify.backends.engine.model.family.experts import ExactRouter, expert_counts, stack_experts
from specverify.backends.engine.model.family.hybrid_delta_rule import (
    ExactGatedNorm,
    TreeRows,
    delta_rule_counts,
    over_trees,
    rename_gain,
)
from specverify.backends.engine.model.float64_modules import ExactRotary, rms_norm
from specverify.reference.architecture import Architecture
from specverify.reference.family.qwen3_5 import Qwen35MoeSettings


class TreeSeparateRows(TreeRows):
    """The layers of Qwen3.5 over rows that form a tree: each part of a row has a projection of its own."""

    def enter(self: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `TreeRows.enter`."""
        return self.in_proj_qkv(rows), self.in_proj_z(rows), self.in_proj_b(rows), self.in_proj_a(rows)


class ExactTextRotary(ExactRotary):
    """The rotary tables of a text without images, whose tokens have one position on all three axes."""

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, T, width] for `position_ids` [3, B, T] or [B, T]."""
        return super().forward(hidden, position_ids[0] if position_ids.dim() == 3 else position_ids)


def _exact_rotary(_: nn.Module, config: Any) -> nn.Module:
    return ExactTextRotary(config)


def _moe_fields(arch: Architecture) -> dict[str, Any]:
    settings = Qwen35MoeSettings.of(arch)
    counts = expert_counts(settings)
    counts.pop("norm_topk_prob")  # transformers' router always scales the weights to the sum of 1
    return {
        **delta_rule_counts(arch),
        **counts,
        "num_experts": settings.experts,
        "shared_expert_intermediate_size": settings.shared_size,
    }


if hasattr(transformers, "Qwen3_5ForCausalLM"):  # later than the oldest release that the engine runs on
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet

    QWEN3_5 = ModelFamily(
        "qwen3_5",
        transformers.Qwen3_5TextConfig,
        transformers.Qwen3_5ForCausalLM,
        delta_rule_counts,
        one_bias=True,
        rename=rename_gain,
        prepare=over_trees(Qwen3_5GatedDeltaNet, TreeSeparateRows),
        exact={
            "Qwen3_5RMSNorm": rms_norm("eps", offset=1.0),
            "Qwen3_5RMSNormGated": ExactGatedNorm,
            "Qwen3_5TextRotaryEmbedding": _exact_rotary,
        },
    )

    QWEN3_5_MOE = ModelFamily(
        "qwen3_5_moe",
        transformers.Qwen3_5MoeTextConfig,
        transformers.Qwen3_5MoeForCausalLM,
        _moe_fields,
        one_bias=True,
        rename=rename_gain,
        arrange=stack_experts,
        prepare=over_trees(Qwen3_5MoeGatedDeltaNet, TreeSeparateRows),
        exact={
            "Qwen3_5MoeRMSNorm": rms_norm("eps", offset=1.0),
            "Qwen3_5MoeRMSNormGated": ExactGatedNorm,
            "Qwen3_5MoeTextRotaryEmbedding": _exact_rotary,
            "Qwen3_5MoeTopKRouter": ExactRouter,
        },
    )
