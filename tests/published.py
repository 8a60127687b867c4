"""Checkpoints of published configs: the fields of a config.json as published, sizes shrunk, weights of usual scale."""

import json
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

CONFIGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
"""The name of a model to the content of its config.json."""

SOURCES = {
    "command-r7b": "CohereLabs/c4ai-command-r7b-12-2024",
    "ernie-4.5-0.3b": "baidu/ERNIE-4.5-0.3B-PT",
    "ernie-4.5-21b-a3b": "baidu/ERNIE-4.5-21B-A3B-PT",
    "mimo-v2-flash": "XiaomiMiMo/MiMo-V2-Flash, in the fields of transformers 5.23",
    "minimax-m2": "MiniMaxAI/MiniMax-M2",
    "qwen3.5-27b": "text_config of Qwen/Qwen3.5-27B",
    "qwen3.5-35b-a3b": "text_config of Qwen/Qwen3.5-35B-A3B",
}
"""Whose config.json a model has, where its name does not say so."""

ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

TRAINING_STEPS = 40
"""Steps of Adam by which `trained` weights leave their initialisation."""


PUBLISHED_WIDTH = 4096
"""Hidden size of a published model, whose gain the weights of odd seeds keep."""


def network_of(name: str, seed: int, trained: bool = False) -> PreTrainedModel:
    """The model `name` with the initialisation that transformers gives it, or trained on a text of its own.

    Seeds are of two kinds. Even ones have the published deviation of weights, with which a narrow layer adds little to
    the residual stream; odd ones a deviation with which it adds as much as a layer of PUBLISHED_WIDTH.
    """
    torch.manual_seed(seed)
    fields = dict(CONFIGS[name])
    if seed % 2:
        fields["initializer_range"] *= (PUBLISHED_WIDTH / fields["hidden_size"]) ** 0.5
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, **ENDS)
    network: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if trained:
        train(network, int(fields["vocab_size"]), seed)
    network.eval()
    return network


def train(network: PreTrainedModel, vocab_size: int, seed: int) -> None:
    """Train `network` on a Markov chain in which each token has three successors."""
    draw = torch.Generator().manual_seed(seed)
    successors = torch.randint(vocab_size, (vocab_size, 3), generator=draw)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    network.train()
    for _ in range(TRAINING_STEPS):
        tokens = [torch.randint(vocab_size, (8,), generator=draw)]
        for _ in range(23):
            tokens.append(successors[tokens[-1], torch.randint(3, (8,), generator=draw)])
        text = torch.stack(tokens, dim=1)
        logits = network(text, use_cache=False).logits[:, :-1]
        optimizer.zero_grad()
        cross_entropy(logits.reshape(-1, logits.shape[-1]), text[:, 1:].reshape(-1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def save_model(name: str, folder: Path, seed: int = 0, trained: bool = False) -> Path:
    """A directory with the config.json and the safetensors weights of the model `name`."""
    logging.disable_progress_bar()
    place = folder / f"{name}-{seed}{'-trained' if trained else ''}"
    network_of(name, seed, trained).save_pretrained(place)
    return place
