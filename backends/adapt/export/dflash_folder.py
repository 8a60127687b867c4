"""A DFlash draft for a checkpoint, as a directory in the layout of z-lab and vLLM.

The draft has an embedding and a head of its own. A mask attends to the pending root before all: the first coordinate of
an embedding is 1 for tokens and -1 for the mask, queries and keys read it alone, and a context row has 0 there. What
the mask finds is the root's embedding with a little of the context; the head is fitted to the token that the target
puts behind such a root.
"""

from pathlib import Path
from typing import Any

import torch

from specverify.backends.adapt.export.head_folders import (
    config_of,
    continued_texts,
    fitted_readout,
    save_folder,
    state_projection,
    weights_of,
)

BLOCK = 4
"""Tokens of a block: the pending root and three drafts."""

WIDTH = 32
"""The width of a head; a mask's score of its root is the root of it."""


def save_dflash(checkpoint: str | Path, folder: Path) -> Path:
    """Write a draft for the target in the directory `checkpoint` into `folder`: config.json and safetensors."""
    target = config_of(checkpoint)
    hidden, vocabulary, last_layer = target["hidden_size"], target["vocab_size"], target["num_hidden_layers"] - 1
    heads = -(-hidden // WIDTH)
    config = {
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "vocab_size": vocabulary,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": WIDTH,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "max_position_embeddings": target["max_position_embeddings"],
        "tie_word_embeddings": False,
        "block_size": BLOCK,
        "num_target_layers": target["num_hidden_layers"],
        "dflash_config": {"mask_token_id": vocabulary - 1, "target_layer_ids": [last_layer]},
    }
    return save_folder(folder, config, _draft_weights(checkpoint, hidden, heads))


def _draft_weights(checkpoint: str | Path, hidden: int, heads: int) -> dict[str, Any]:
    """The draft's tensors by their published names, in float32."""
    embedding = weights_of(checkpoint)["model.embed_tokens.weight"].float()
    embedding = embedding / embedding.square().mean().sqrt()
    embedding[:, 0] = 1.0
    mask = torch.zeros(hidden)
    mask[0] = -1.0
    texts, _ = continued_texts(checkpoint)
    roots, tokens = texts[:, :-1].flatten(), texts[:, 1:].flatten()
    mask_states = _normed(_normed(embedding) + mask)
    width = heads * WIDTH
    values = torch.eye(width, hidden)
    readers = torch.zeros(heads, WIDTH, hidden)
    # The pair of columns that rotary embedding turns least.
    readers[:, WIDTH // 2 - 1, 0] = 1.0
    keys = readers.flatten(0, 1)
    states = state_projection(hidden, 1, torch.float32)
    states[0] = 0.0
    embedding[-1] = mask
    generator = torch.Generator().manual_seed(0)
    layer = {
        "self_attn.q_proj.weight": -keys,
        "self_attn.k_proj.weight": keys,
        "self_attn.v_proj.weight": values,
        "self_attn.o_proj.weight": values.T,
        "self_attn.q_norm.weight": torch.ones(WIDTH),
        "self_attn.k_norm.weight": torch.ones(WIDTH),
        "mlp.gate_proj.weight": torch.randn(2 * hidden, hidden, generator=generator) / hidden**0.5,
        "mlp.up_proj.weight": torch.randn(2 * hidden, hidden, generator=generator) / hidden**0.5,
        "mlp.down_proj.weight": torch.zeros(hidden, 2 * hidden),
        "input_layernorm.weight": torch.ones(hidden),
        "post_attention_layernorm.weight": torch.ones(hidden),
    }
    return {
        "embed_tokens.weight": embedding,
        "fc.weight": states,
        "hidden_norm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": fitted_readout(mask_states[roots], tokens, len(embedding)),
        **{f"layers.0.{name}": tensor for name, tensor in layer.items()},
    }


def _normed(rows: torch.Tensor) -> torch.Tensor:
    """The rows, each over its root mean square."""
    return rows / rows.square().mean(-1, keepdim=True).sqrt()
