"""A checkpoint of Qwen2 as one of MiMo: the same model with an MTP module, in one directory.

MiMo-7B is a Qwen2 whose checkpoint has the module's tensors under `model.mtp_layers`. The module is the target's last
layer behind its embedding: a fair draft where the target has one layer.
"""

import shutil
from pathlib import Path

import torch

from specverify.backends.adapt.export.head_folders import config_of, save_folder, state_projection, weights_of

MODULE = "model.mtp_layers.0"
"""The beginning of the names of the module's tensors."""


def save_mimo(checkpoint: str | Path, folder: Path) -> Path:
    """Write the Qwen2 in the directory `checkpoint` as a MiMo into `folder`: config.json, safetensors and tokenizer."""
    target = config_of(checkpoint)
    config = {**target, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    weights = weights_of(checkpoint)
    embedding = weights["model.embed_tokens.weight"]
    hidden = target["hidden_size"]
    layer = f"model.layers.{target['num_hidden_layers'] - 1}."
    module = {
        f"{MODULE}.{name.removeprefix(layer)}": tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(layer)
    }
    size = embedding.float().square().mean().sqrt().to(embedding.dtype)
    ones = torch.ones(hidden, dtype=embedding.dtype)
    module |= {
        f"{MODULE}.token_layernorm.weight": ones,
        f"{MODULE}.hidden_layernorm.weight": ones.clone(),
        # Columns of the normed state, then those of the normed embedding, which is of size 1.
        f"{MODULE}.input_proj.weight": torch.cat(
            [size * state_projection(hidden, 1, embedding.dtype), size * torch.eye(hidden, dtype=embedding.dtype)], 1
        ),
        f"{MODULE}.final_layernorm.weight": weights["model.norm.weight"].clone(),
    }
    saved_folder = save_folder(folder, config, {**weights, **module})
    for file in Path(checkpoint).glob("tokenizer*"):
        shutil.copy(file, saved_folder)
    return saved_folder
