"""Tiny checkpoints of many families, made with transformers' own classes and seeded weights."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

BASE: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip

LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
}  # fmt: skip

CAPPED = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0}

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "gemma2": ("Gemma2", {**CAPPED, "query_pre_attn_scalar": 8, "sliding_window": 6}),
    "gpt-oss": ("GptOss", {**EXPERTS, "sliding_window": 6, "rope_parameters": PLAIN_ROPE}),
    "mixtral": ("Mixtral", EXPERTS),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "deepseek-v3": ("DeepseekV3", LATENT),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "mamba": ("Mamba", {"state_size": 4}),
}  # fmt: skip
"""Family to the name of transformers' classes, and what its config has beside BASE."""


def saved(family: str, folder: Path) -> Path:
    """A directory with the config and the safetensors weights of a tiny model of `family`."""
    name, fields = FAMILIES[family]
    torch.manual_seed(0)
    network = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**{**BASE, **fields}))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            spread = 0.1 if parameter.ndim == 1 else 0.3
            parameter.copy_((parameter.ndim == 1) + spread * torch.randn(parameter.shape, generator=draw))
    logging.disable_progress_bar()
    network.save_pretrained(folder / family)
    return folder / family
