"""A target of a stranger in our engine, right and with one planted fault."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specverify.adapt import component


class Recomputing:
    """A target without a cache: each row is the last row of a forward over its whole text.

    Faults: before (the logits of the token before), layer (the states of the layer above), late (a row too many is
    kept), sibling (a row sees the row before it, whatever its parent), root (a decode answers from the text without its
    token).
    """

    def __init__(self, checkpoint: str, layers: tuple[int, ...] | None, width: int, fault: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
        self._layers, self._width, self._fault = layers, width, fault
        self._text: list[int] = []
        self._rows: list[int] = []

    def begin(self) -> None:
        self._text = []

    def prefill(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        self._text += tokens.tolist()
        return self._last(self._text)

    def decode(self, token: Tensor) -> tuple[Tensor, Tensor | None]:
        self._text += token.tolist()
        return self._last(self._text[:-1] if self._fault == "root" else self._text)

    def verify(self, tokens: Tensor, positions: Tensor, parent: Tensor) -> tuple[Tensor, Tensor | None]:
        self._rows = tokens.tolist()
        answers = []
        for row in range(len(self._rows)):
            path, node = [row], row
            while node:
                node = node - 1 if self._fault == "sibling" else int(parent[node])
                path.append(node)
            answers.append(self._last([*self._text, *(self._rows[row] for row in reversed(path))]))
        states = [state for _, state in answers if state is not None]
        return torch.stack([logits for logits, _ in answers]), torch.stack(states) if states else None

    def keep(self, path: list[int]) -> None:
        self._text += [self._rows[row] for row in path]
        if self._fault == "late" and len(path) < len(self._rows):
            self._text.append(self._rows[len(path)])

    def _last(self, text: list[int]) -> tuple[Tensor, Tensor | None]:
        """The logits and the state of the last token of a text."""
        with torch.no_grad():
            out = self._model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
        logits = out.logits[0, -2 if self._fault == "before" and len(text) > 1 else -1]
        if self._layers is None:
            return logits, None
        higher = 1 if self._fault == "layer" else 0
        # transformers' hidden_states[i] is the stream after layer i - 1; the last one is normed.
        places = [layer + 1 + higher for layer in self._layers] or [-1 - higher]
        return logits, torch.cat([out.hidden_states[place][0, -1] for place in places])


def target(fault: str = "") -> Callable[..., Any]:
    """A target without a cache; its faults are those of `Recomputing`."""

    def open_target(checkpoint: str, layers: tuple[int, ...] | None, width: int) -> Recomputing:
        return Recomputing(checkpoint, layers, width, fault)

    return open_target


open_target = component(target=target(), name="plain-target")
