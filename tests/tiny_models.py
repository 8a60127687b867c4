"""A tiny config of any model type that transformers knows: its class's defaults with small sizes."""

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "sliding_window": 16,
    "attention_chunk_size": 16,
    # experts
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_routed_experts": 4, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "num_experts_per_token": 2, "top_k_experts": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
    # latent attention and indexers
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
    # recurrent state
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_num_heads": 4, "mamba_head_dim": 16,
    # Gemma
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0,
    "global_head_dim": 8,
    # names of older classes
    "d_model": 32, "n_layer": 2, "n_head": 4, "n_embd": 32, "n_layers": 2, "n_heads": 4, "d_ff": 48, "ffn_dim": 48,
    "n_positions": 128, "n_ctx": 128, "n_inner": 48, "rotary_dim": 8, "embedding_size": 32, "kv_channels": 8,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_layers": 1,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
}  # fmt: skip
"""Small values of size fields, where a class has them."""

LAYERED = ("layer_types", "mlp_layer_types", "layers_block_type", "moe_layers", "no_rope_layers", "indexer_types")
"""Lists with an entry for each layer, of which the first and the last one stay."""

ENDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}


def tiny_config(kind: str) -> Any:
    """The text config of the model type `kind` with two layers and 64 tokens; some classes admit none."""
    config = AutoConfig.for_model(kind).get_text_config(decoder=True)
    fields = config.to_dict()
    layers = fields.get("num_hidden_layers")
    small = {name: value for name, value in SIZES.items() if name in fields or hasattr(config, name)}
    for name, value in fields.items():
        if isinstance(value, list) and value and (name in LAYERED or ((layers or 0) > 2 and len(value) == layers)):
            small[name] = [value[0], value[-1]]
    for name in ("model_type", "per_layer_config"):
        fields.pop(name, None)
    fields |= small
    if "kv_lora_rank" in fields:  # latent attention has as many heads of keys as of queries
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    try:
        return type(config)(**{**fields, **ENDS})
    except StrictDataclassError:  # some classes ask for special tokens
        return type(config)(**{**fields, **dict.fromkeys(ENDS, 1)})
