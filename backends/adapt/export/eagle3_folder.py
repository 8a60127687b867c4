"""An EAGLE-3 head for a checkpoint, as a directory in the layout of vLLM and speculators.

No released head fits the small targets of cases. Here a head's layer is the target's last one, which reads the token's
embedding beside the state, and its scores are made by the target's matrix: a fair draft where the target has one layer.
"""

from pathlib import Path
from typing import Any

import torch

from specverify.backends.adapt.export.head_folders import (
    LAYER_FIELDS,
    config_of,
    save_folder,
    state_projection,
    weights_of,
)

MOST_STATES = 3
"""States of the target that the head reads: inputs of its first layers, and the output of the last."""

PROJECTIONS = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
"""The matrices that are the target's own; biases and norms of queries and keys are left out."""


def save_eagle3(checkpoint: str | Path, folder: Path) -> Path:
    """Write a head for the target in the directory `checkpoint` into `folder`: config.json and safetensors.

    The target's layers are those of a Llama, whatever its family adds to them.
    """
    target = config_of(checkpoint)
    last_layer = target["num_hidden_layers"] - 1
    read_layers = [*range(last_layer + 1), last_layer + 1][-MOST_STATES:]
    config = {
        **{name: target[name] for name in LAYER_FIELDS},
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "draft_vocab_size": target["vocab_size"],
        "tie_word_embeddings": False,
        "num_aux_hidden_states": len(read_layers),
        "eagle_aux_hidden_state_layer_ids": read_layers,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": read_layers, "use_aux_hidden_state": True},
    }
    weights = _head_weights(weights_of(checkpoint), last_layer, target["hidden_size"], len(read_layers))
    return save_folder(folder, config, weights)


def _head_weights(weights: dict[str, Any], last_layer: int, hidden: int, num_states: int) -> dict[str, Any]:
    """The head's tensors by the names of vLLM."""
    embedding = weights["model.embed_tokens.weight"]
    layer = f"model.layers.{last_layer}"
    head = {
        "fc.weight": state_projection(hidden, num_states, embedding.dtype),
        "lm_head.weight": weights.get("lm_head.weight", embedding).clone(),
        "norm.weight": weights["model.norm.weight"].clone(),
        "layers.0.hidden_norm.weight": torch.ones(hidden, dtype=embedding.dtype),
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        head[f"layers.0.{name}.weight"] = weights[f"{layer}.{name}.weight"].clone()
    for name in ("q_proj", "k_proj", "v_proj"):
        matrix = weights[f"{layer}.self_attn.{name}.weight"]
        # Columns of the normed embedding, then those of the normed state.
        head[f"layers.0.self_attn.{name}.weight"] = torch.cat([matrix, torch.zeros_like(matrix)], dim=1)
    for name in PROJECTIONS:
        head[f"layers.0.{name}.weight"] = weights[f"{layer}.{name}.weight"].clone()
    return head
