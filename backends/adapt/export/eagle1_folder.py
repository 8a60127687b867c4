"""An EAGLE-1 head for a checkpoint, as a directory in the layout of SafeAILab and vLLM.

The head's layer is the target's last one. It has no norm before its attention and none behind it, so that the target's
norms are folded into its matrices: a fair draft where the target has one layer.
"""

from pathlib import Path

import torch

from specverify.backends.adapt.export.head_folders import (
    LAYER_FIELDS,
    config_of,
    save_folder,
    state_projection,
    weights_of,
)


def save_eagle1(checkpoint: str | Path, folder: Path) -> Path:
    """Write a head for the target in the directory `checkpoint` into `folder`: config.json and safetensors.

    The target's layers are those of a Llama, whatever its family adds to them. The head has neither embedding nor
    matrix of its own: an engine shares the target's.
    """
    target = config_of(checkpoint)
    config = {
        **{name: target[name] for name in LAYER_FIELDS},
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "bias": False,
    }
    return save_folder(folder, config, _head_weights(weights_of(checkpoint), target))


def _head_weights(weights: dict[str, torch.Tensor], target: dict[str, int]) -> dict[str, torch.Tensor]:
    """The head's tensors by their published names.

    Its stream is the target's over `size`, the size of an embedding, times the gains of the final norm.
    """
    embedding = weights["model.embed_tokens.weight"]
    layer, hidden = f"model.layers.{target['num_hidden_layers'] - 1}", target["hidden_size"]
    size = embedding.square().mean().sqrt()
    gains = weights["model.norm.weight"]
    gains = torch.where(gains.abs() < 0.1, 0.1, gains)
    scales = gains / size
    head = {
        "fc.weight": torch.cat([torch.diag(scales), state_projection(hidden, 1, embedding.dtype)], 1),
        "layers.0.post_attention_layernorm.weight": weights[f"{layer}.post_attention_layernorm.weight"] / gains,
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        norm_gains = weights[f"{layer}.input_layernorm.weight"]
        head[f"layers.0.self_attn.{name}.weight"] = weights[f"{layer}.self_attn.{name}.weight"] * norm_gains / gains
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        head[f"layers.0.{name}.weight"] = weights[f"{layer}.{name}.weight"] * scales[:, None]
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        head[f"layers.0.{name}.weight"] = weights[f"{layer}.{name}.weight"].clone()
    return head
