"""The common parts of exporters of heads: a target's weights and texts, and a folder of tensors.

No released head fits the small targets of cases. A head whose next token is a layer's is made of the target's own last
layer; one that is a readout of a state is fitted to texts that the target continues. Both are fair drafts: some of
their tokens are accepted, and others are not.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specverify.backends.adapt.models import open_network

FROM_STATES = 0.05
"""Scale of the random weights through which a head of layers reads the target's states."""

LAYER_FIELDS = (
    "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_parameters", "max_position_embeddings",
)  # fmt: skip
"""The fields of config.json that a head of one layer has from its target."""

TEXTS, PROMPT, CONTINUED = 128, 6, 10
"""Texts to which a readout is fitted, the random tokens that each begins with, and the target's own behind them."""

RIDGE = 0.01
"""The weight of the readout's size beside its error, as a share of the states' mean square."""


def config_of(checkpoint: str | Path) -> dict[str, Any]:
    """The fields of a checkpoint's config.json."""
    fields: dict[str, Any] = json.loads((Path(checkpoint) / "config.json").read_text())
    return fields


def weights_of(checkpoint: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by name."""
    weights: dict[str, torch.Tensor] = {}
    for file in Path(checkpoint).glob("*.safetensors"):
        weights |= load_file(file)
    return weights


def save_folder(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """Write config.json and the tensors into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def state_projection(hidden: int, num_states: int, dtype: torch.dtype) -> torch.Tensor:
    """A small random matrix [hidden, num_states * hidden] through which a head reads states; the same each time."""
    generator = torch.Generator().manual_seed(0)
    matrix: torch.Tensor = torch.randn(hidden, num_states * hidden, generator=generator)
    return (FROM_STATES * matrix / math.sqrt(num_states * hidden)).to(dtype)


@torch.no_grad()
def continued_texts(checkpoint: str | Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts [TEXTS, PROMPT + CONTINUED] that the target continues greedily, and its states [.., hidden] behind them.

    A state is what the target's head reads.
    """
    network = open_network(checkpoint)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(network.config.vocab_size, (TEXTS, PROMPT), generator=generator)
    for _ in range(CONTINUED):
        logits = network(texts, use_cache=False, logits_to_keep=1).logits[:, -1]
        texts = torch.cat([texts, logits.argmax(-1, keepdim=True)], 1)
    states: torch.Tensor = network.model(texts, use_cache=False).last_hidden_state
    return texts, states


def fitted_readout(states: torch.Tensor, tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The matrix [vocabulary, hidden] whose scores of `states` [n, hidden] come nearest to naming `tokens` [n]."""
    states = states.double()
    moments = states.T @ states
    moments += RIDGE * moments.diagonal().mean() * torch.eye(len(moments), dtype=torch.float64)
    sums = torch.zeros(vocabulary, states.shape[1], dtype=torch.float64).index_add_(0, tokens, states)
    matrix: torch.Tensor = torch.linalg.solve(moments, sums.T).T.float()
    return matrix
