"""Parts that the stand-ins of engines share: laws, logits and looked-up drafts over plain transformers models."""

import sys
from typing import Any

import torch


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
