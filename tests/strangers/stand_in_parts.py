"""Parts that the stand-ins of engines share: laws, logits and drafts over plain transformers models."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def forget_package(package: str) -> None:
    """Take a package out of the imported modules, so that the next import finds another of its name."""
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


def law_of(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The law of a token by its logits [V], after temperature, top-k and top-p."""
    if temperature == 0.0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    scores = logits.double() / temperature
    if top_k > 0:
        scores = scores.masked_fill(scores < scores.topk(min(top_k, len(scores))).values[-1], -torch.inf)
    law = scores.softmax(-1)
    ranked, order = law.sort(descending=True)
    law[order[ranked.cumsum(-1) - ranked >= top_p]] = 0.0
    return law / law.sum()


def logits_behind(network: Any, text: list[int]) -> torch.Tensor:
    """The logits [tokens, V] behind each token of a text."""
    logits: torch.Tensor = network(torch.tensor([text]), use_cache=False).logits[0]
    return logits


def looked_up(text: list[int], most: int) -> list[int]:
    """The tokens after the latest earlier place of the text's last token."""
    places = [place for place in range(len(text) - 1) if text[place] == text[-1]]
    return text[places[-1] + 1 :][:most] if places else []


class Head:
    """An EAGLE-3 head by its scores alone: those of a token's embedding, as if its layer added nothing."""

    def __init__(self, folder: str) -> None:
        config = json.loads((Path(folder) / "config.json").read_text())
        weights = load_file(Path(folder) / "model.safetensors")
        hidden = config["hidden_size"]
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert weights["fc.weight"].shape == (hidden, config["num_aux_hidden_states"] * hidden)
        assert weights["layers.0.self_attn.q_proj.weight"].shape[1] == 2 * hidden
        self._scores = weights["lm_head.weight"]

    def best_tokens(self, network: Any, text: list[int], most: int) -> list[int]:
        tokens = text[-1:]
        for _ in range(most):
            tokens.append(int((self._scores @ network.get_input_embeddings().weight[tokens[-1]]).argmax()))
        return tokens[1:]
