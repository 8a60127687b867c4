"""The Phi-3 and GLM-4 families, whose projections transformers holds fused."""

from typing import Any

import torch
from torch import Tensor
from transformers import Glm4Config, Glm4ForCausalLM, Phi3Config, Phi3ForCausalLM

from specverify.backends.engine.model.family.base import ModelFamily, one_window
from specverify.backends.engine.model.float64_modules import rms_norm
from specverify.reference.architecture import Architecture

Parts = dict[str, tuple[str, ...]]
"""The name of a fused projection, and the projections whose rows it holds, in order."""

GATE_UP: Parts = {"gate_up_proj": ("gate_proj", "up_proj")}
QKV: Parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}


def join_projections(state: dict[str, Tensor], parts: Parts) -> dict[str, Tensor]:
    """The state dict with the rows of some projections in one tensor."""
    fused_state = dict[str, Tensor]()
    for name, tensor in state.items():
        fused = next((fused_name for fused_name, part_names in parts.items() if f".{part_names[0]}." in name), None)
        if fused is not None:
            first = parts[fused][0]
            rows = [state[name.replace(first, part_name)] for part_name in parts[fused]]
            fused_state[name.replace(first, fused)] = torch.cat(rows)
        elif not any(f".{part_name}." in name for part_names in parts.values() for part_name in part_names):
            fused_state[name] = tensor
    return fused_state


def _phi3(arch: Architecture) -> dict[str, Any]:
    return {"sliding_window": max(arch.windows) or None, "original_max_position_embeddings": arch.rope.original or 4096}


PHI3 = ModelFamily(
    "phi3",
    Phi3Config,
    Phi3ForCausalLM,
    _phi3,
    windows=one_window,
    arrange=lambda state, _: join_projections(state, {**QKV, **GATE_UP}),
    exact={"Phi3RMSNorm": rms_norm("variance_epsilon")},
)
GLM4 = ModelFamily(
    "glm4",
    Glm4Config,
    Glm4ForCausalLM,
    lambda arch: {"attention_bias": arch.qkv_bias},
    arrange=lambda state, _: join_projections(state, GATE_UP),
    exact={"Glm4RMSNorm": rms_norm("variance_epsilon")},
)
