"""The gpt-oss family, whose heads have sinks.

transformers holds all experts of a layer in one tensor, with the inputs first, and the columns of gate and up in turn.
"""

import re
from typing import Any

import torch
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.family.base import ModelFamily, equal_windows, layer_types
from specverify.backends.engine.model.float64_modules import ExactRotary, rms_norm
from specverify.reference.architecture import Architecture
from specverify.reference.family.gpt_oss import GptOssSettings

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


def _arrange(state: dict[str, Tensor], arch: Architecture) -> dict[str, Tensor]:
    arranged = dict[str, Tensor]()
    experts = dict[tuple[str, str], dict[tuple[str, int], Tensor]]()
    for name, tensor in state.items():
        expert = EXPERT.fullmatch(name)
        if expert is None:
            arranged[name.replace(".mlp.gate.", ".mlp.router.")] = tensor
        else:
            experts.setdefault((expert[1], expert[4]), {})[expert[3], int(expert[2])] = tensor
    for (prefix, kind), parts in experts.items():
        gate, up, down = (
            torch.stack([parts[part, expert_number] for expert_number in range(GptOssSettings.of(arch).experts)])
            for part in ("gate", "up", "down")
        )
        # [experts, 2 * inner, ...] with the rows of gate and up in turn.
        turns = torch.stack([gate, up], 2).flatten(1, 2)
        if kind == "bias":
            arranged |= {f"{prefix}.gate_up_proj_bias": turns, f"{prefix}.down_proj_bias": down}
        else:
            swapped = {"gate_up_proj": turns, "down_proj": down}
            arranged |= {f"{prefix}.{name}": tensor.transpose(1, 2).contiguous() for name, tensor in swapped.items()}
    return arranged


def _fields(arch: Architecture) -> dict[str, Any]:
    if arch.score_cap:
        raise Unsupported("gpt_oss with a soft cap: transformers' attention with sinks has none")
    settings = GptOssSettings.of(arch)
    return {
        "layer_types": layer_types(arch),
        "sliding_window": max(arch.windows) or 1,  # transformers makes its mask even where no layer has a window
        "num_local_experts": settings.experts,
        "num_experts_per_tok": settings.experts_per_token,
        "swiglu_alpha": settings.gate_alpha,
        "swiglu_limit": settings.gate_limit,
    }


class ExactHalfRotary(ExactRotary):
    """The same tables with one entry for each pair of dimensions, as gpt-oss expects them."""

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, T, head_dim / 2] for `position_ids` [B, T]."""
        cos, sin = super().forward(hidden, position_ids)
        half = cos.shape[-1] // 2
        return cos[..., :half], sin[..., :half]


GPT_OSS = ModelFamily(
    "gpt_oss",
    GptOssConfig,
    GptOssForCausalLM,
    _fields,
    windows=equal_windows,
    one_bias=True,
    arrange=_arrange,
    exact={
        "GptOssRMSNorm": rms_norm("variance_epsilon"),
        "GptOssRotaryEmbedding": lambda _, config: ExactHalfRotary(config),
    },
)
