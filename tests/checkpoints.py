"""Tiny checkpoints of many families, made with transformers' own classes and seeded weights."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from specverify.backends.adapt.models import words_tokenizer

BASE: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip

LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip

INDEXED = {"index_n_heads": 12, "index_head_dim": 12, "index_topk": 5, "n_group": 1, "topk_group": 1}

LATENT_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 0.7,
    "mscale_all_dim": 1.1,
}  # fmt: skip

CAPPED = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0}

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}

LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}

BAND = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}

LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "short_factor": [1.0, 2.0, 3.0],
    "long_factor": [4.0, 5.0, 6.0],
}  # fmt: skip

SCALED_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "max_position_embeddings": 256,
}  # fmt: skip

STRETCHED_ROPE = {**PLAIN_ROPE, "rope_type": "dynamic", "factor": 1.0, "alpha": 9.0}

BANDLESS_ROPE = {**LLAMA3_ROPE, "low_freq_factor": 1.0, "high_freq_factor": 1.0}

IROPE = {
    "num_local_experts": 4, "intermediate_size": 24, "intermediate_size_mlp": 40, "no_rope_layers": [1, 0],
    "attention_chunk_size": 6, "floor_scale": 4, "attn_scale": 0.5, "rope_parameters": PLAIN_ROPE,
}  # fmt: skip

HYBRID = ["sliding_attention", "full_attention"]

MULTIPLIED = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22, "logits_scaling": 4.0,
}  # fmt: skip

RECURRENT = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 3, "head_dim": 8,
}  # fmt: skip

MIXED = {
    "mamba_d_ssm": 24, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 5, "mamba_d_conv": 3,
    "mamba_rms_norm": True, "mlp_multipliers": [1.25, 0.75], "ssm_multipliers": [0.75, 1.25, 0.5, 1.5, 2.0],
    "key_multiplier": 0.5, "lm_head_multiplier": 0.75, "embedding_multiplier": 2.0, "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.75, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.5, "attention_bias": True,
}  # fmt: skip

DENSE_RECURRENT = {
    name: value for name, value in RECURRENT.items() if name.startswith(("layer_types", "linear", "head"))
}

SHARING = {
    "num_hidden_layers": 4, "layer_types": HYBRID * 2, "sliding_window": 6, "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True, "global_head_dim": 12, "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 32, "final_logit_softcapping": 6.0,
}  # fmt: skip

ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

MIMO = {
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 6,
    "num_key_value_heads": 2,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
        for kind, theta in (("full_attention", 1e6), ("sliding_attention", 1e4))
    },
}

ERNIE = {
    "moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1, "hidden_size": 32,
    "moe_layer_start_index": 1,
}  # fmt: skip

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "gemma2": ("Gemma2", {**CAPPED, "query_pre_attn_scalar": 8, "sliding_window": 6}),
    "gpt-oss": ("GptOss", {**EXPERTS, "sliding_window": 6, "rope_parameters": PLAIN_ROPE}),
    "mixtral": ("Mixtral", EXPERTS),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "deepseek-v3": ("DeepseekV3", {**LATENT, "rope_parameters": LATENT_ROPE}),
    "deepseek-v2": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "n_group": 2, "topk_method": "group_limited_greedy"}),
    "glm4-moe-lite": ("Glm4MoeLite", LATENT),
    "ernie4.5": ("Ernie4_5", {"use_bias": True}),
    "ernie4.5-moe": ("Ernie4_5_Moe", ERNIE),
    "mimo-v2-flash": ("MiMoV2Flash", MIMO),
    "minimax-m2": ("MiniMaxM2", {**EXPERTS, "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5}}),
    "cohere2": ("Cohere2", {"sliding_window": 6, "sliding_window_pattern": 2, "logit_scale": 0.5}),
    "nemotron": ("Nemotron", {}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "mamba": ("Mamba", {"state_size": 4}),
    "qwen2-moe": ("Qwen2Moe", {**ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 20}),
    "glm4-moe": ("Glm4Moe", {**ROUTED, "n_routed_experts": 4, "use_qk_norm": True, "n_group": 2}),
    "phi3": ("Phi3", {"sliding_window": 6, "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.75}}),
    "phi3-long": ("Phi3", {"original_max_position_embeddings": 64, "rope_parameters": LONG_ROPE}),
    "glm4": ("Glm4", {}),
    "seed-oss": ("SeedOss", {"attention_out_bias": True}),
    "ministral3": ("Ministral3", {"rope_parameters": SCALED_ROPE}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 6}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 6, "layer_types": HYBRID}),
    "exaone4": ("Exaone4", {"sliding_window": 6, "sliding_window_pattern": 2}),
    "granite": ("Granite", MULTIPLIED),
    "hunyuan": ("HunYuanDenseV1", {"rope_parameters": STRETCHED_ROPE}),
    "apertus": ("Apertus", {"rope_parameters": {**LLAMA3_ROPE, **BAND}}),
    "llama4": ("Llama4", IROPE),
    "llama4-dense-first": ("Llama4", {**IROPE, "interleave_moe_layer_step": 2, "rope_parameters": BANDLESS_ROPE}),
    "qwen3-next": ("Qwen3Next", RECURRENT),
    "qwen3.5": ("Qwen3_5", DENSE_RECURRENT),
    "qwen3.5-moe": ("Qwen3_5Moe", RECURRENT),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 4, "block_multiple_of": 16}),
    "falcon-h1": ("FalconH1", MIXED),
    "deepseek-v3.2": ("DeepseekV32", {**LATENT, **INDEXED, "rope_parameters": LATENT_ROPE}),
    "glm-5": ("GlmMoeDsa", {**LATENT, **INDEXED, "indexer_types": ["full", "shared"]}),
    "gemma4": ("Gemma4", SHARING),
    "gemma4-keys-as-values": ("Gemma4", {
        "layer_types": HYBRID, "sliding_window": 6, "attention_k_eq_v": True, "global_head_dim": 12,
        "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
    }),
    "gemma3": ("Gemma3", {"sliding_window": 6, "layer_types": HYBRID, "query_pre_attn_scalar": 6}),
}  # fmt: skip
"""Family to the name of transformers' classes, and what its config has beside BASE."""

MODEL_TYPES = {name: FAMILIES[name][0] for name in FAMILIES if name not in (
    "llama", "mistral", "gemma2", "glm4-moe-lite", "nemotron", "bloom", "mamba",
)}  # fmt: skip
"""The checkpoints of families that cases draw rarely, each with the name of transformers' classes."""


WITH_TOWERS = ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")
"""Names of transformers' classes whose text model has a config of its own."""


def save_checkpoint(family: str, folder: Path, **changes: Any) -> Path:
    """A directory with the config and the safetensors weights of a tiny model of `family`; `changes` of its config."""
    name, fields = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}TextConfig" if name in WITH_TOWERS else f"{name}Config")
    network = getattr(transformers, f"{name}ForCausalLM")(config(**{**BASE, **fields, **changes}))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            spread = 0.1 if parameter.ndim == 1 else 0.3
            parameter.copy_((parameter.ndim == 1) + spread * torch.randn(parameter.shape, generator=draw))
    logging.disable_progress_bar()
    network.save_pretrained(folder / family)
    return folder / family


def readable(family: str, place: Path) -> Path:
    """A checkpoint with a tokenizer, whose words are numbers."""
    folder = save_checkpoint(family, place)
    words_tokenizer([str(token) for token in range(32)]).save_pretrained(folder)
    return folder
