"""Falcon-H1: a Mamba-2 mixer beside attention in every layer."""

from typing import Any

from torch import Tensor, nn
from transformers import FalconH1Config, FalconH1ForCausalLM

from specverify.backends.engine.model.family.base import ModelFamily, no_irope, no_window, refuse_unequal
from specverify.backends.engine.model.float64_modules import rms_norm
from specverify.backends.engine.model.recurrent.state_space import over_trees, with_factors
from specverify.reference.architecture import Architecture

NAMES = {
    "mamba_n_heads": "mixer_heads",
    "mamba_d_head": "mixer_width",
    "mamba_n_groups": "mixer_groups",
    "mamba_d_state": "state_width",
    "mamba_d_conv": "conv_width",
}
"""Fields of transformers' config that are whole numbers, and our settings."""

FLAGS = {
    "mamba_conv_bias": "conv_bias",
    "mamba_proj_bias": "mixer_bias",
    "projectors_bias": "mixer_output_bias",
    "mamba_rms_norm": "gated_norm",
    "mamba_norm_before_gate": "norm_before_gate",
}

FACTORS = {
    "embedding_multiplier": "embedding_multiplier",
    "lm_head_multiplier": "logits_multiplier",
    "key_multiplier": "key_multiplier",
    "attention_in_multiplier": "attention_in_multiplier",
    "attention_out_multiplier": "attention_out_multiplier",
    "ssm_in_multiplier": "mixer_in_multiplier",
    "ssm_out_multiplier": "mixer_out_multiplier",
}


def _fields(arch: Architecture) -> dict[str, Any]:
    """The fields of the config that other families lack."""
    no_irope(arch)
    no_window(arch)
    refuse_unequal(arch, "qkv_bias and output_bias", arch.qkv_bias, arch.output_bias)
    parts = ("gate", "value", "key", "query", "time")
    return {
        "attention_bias": arch.qkv_bias,
        "mlp_bias": arch.mlp_bias,
        "mamba_d_ssm": int(arch.setting("mixer_heads") * arch.setting("mixer_width")),
        "mlp_multipliers": [arch.setting("gate_multiplier"), arch.setting("down_multiplier")],
        "ssm_multipliers": [arch.setting(f"mixer_{part}_multiplier") for part in parts],
        **{name: int(arch.setting(setting)) for name, setting in NAMES.items()},
        **{name: bool(arch.setting(setting)) for name, setting in FLAGS.items()},
        **{name: arch.setting(setting) for name, setting in FACTORS.items()},
    }


class ExactGroupNorm(nn.Module):
    """The norm of the mixer's output in the dtype of its input: each group is normed, before or after its gate."""

    def __init__(self, module: Any, _: Any) -> None:
        super().__init__()
        self.weight = module.weight
        self.eps = module.variance_epsilon
        self.groups = module.n_groups
        self.first = module.norm_before_gate

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        """Return `hidden` [..., width], normed by group, times weight, and times silu of `gate` [..., width]."""
        gate_values = nn.functional.silu(gate)
        rows = hidden if self.first else hidden * gate_values
        rows = rows.reshape(*rows.shape[:-1], self.groups, -1)
        normed: Tensor = (rows * (rows.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2) * self.weight
        return normed * gate_values if self.first else normed


FALCON_H1 = ModelFamily(
    "falcon_h1",
    FalconH1Config,
    FalconH1ForCausalLM,
    _fields,
    rename=lambda name: name.replace(".mlp.", ".feed_forward.").replace("model.norm.", "model.final_layernorm."),
    complete=with_factors,
    prepare=over_trees,
    exact={"FalconH1RMSNorm": rms_norm("variance_epsilon"), "FalconH1RMSNormGated": ExactGroupNorm},
)
