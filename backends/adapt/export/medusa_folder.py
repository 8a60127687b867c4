"""Medusa heads for a checkpoint, as a directory in the layout of vLLM.

The residual block of a head adds nothing; its matrix is fitted to texts that the target continues.
"""

from pathlib import Path

import torch

from specverify.backends.adapt.export.head_folders import config_of, continued_texts, fitted_readout, save_folder

HEADS = 3
"""Heads, and so the drafted tokens of a round."""


def save_medusa(checkpoint: str | Path, folder: Path) -> Path:
    """Write heads for the target in the directory `checkpoint` into `folder`: config.json and safetensors.

    Head k names the token k + 2 places behind the one whose state it reads; the target names the next one.
    """
    target = config_of(checkpoint)
    hidden, vocabulary = target["hidden_size"], target["vocab_size"]
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "truncated_vocab_size": vocabulary,
        "num_heads": HEADS,
        "num_hidden_layers": 1,
    }
    texts, states = continued_texts(checkpoint)
    weights: dict[str, torch.Tensor] = {}
    for head in range(HEADS):
        far = head + 2
        weights[f"blocks.{head}.layers.0.weight"] = torch.zeros(hidden, hidden)
        weights[f"lm_heads.{head}.weight"] = fitted_readout(
            states[:, :-far].flatten(0, 1), texts[:, far:].flatten(), vocabulary
        )
    return save_folder(folder, config, weights)
