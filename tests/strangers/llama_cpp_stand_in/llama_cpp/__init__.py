"""A stand-in of llama-cpp-python: `Llama.generate` with the published signature and steps, on a model of transformers.

`LLAMA_CPP_STAND_IN_FAULT` plants a fault: drafted-kept, root-of-another-row or temperature-unread.
"""

import os
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch

__version__ = "0.3.36"


class LlamaPromptLookupDecoding:
    """Drafts the tokens that stood behind the text's last token before."""

    def __init__(self, num_pred_tokens: int = 3) -> None:
        self.num_pred_tokens = num_pred_tokens

    def __call__(self, input_ids: Any, /, **settings: Any) -> Any:
        """int [drafted]; empty where the token is new."""
        places = np.flatnonzero(input_ids[:-1] == input_ids[-1])
        if not len(places):
            return np.array([], dtype=np.intc)
        first = int(places[-1]) + 1
        return np.array(input_ids[first : first + self.num_pred_tokens], dtype=np.intc)


class Llama:
    """A model, and the draft that it verifies."""

    def __init__(self, model: Any, draft_model: Any = None) -> None:
        self.model = model
        self.draft_model = draft_model

    def n_vocab(self) -> int:
        """The number of token ids."""
        return int(self.model.config.vocab_size)

    def n_ctx(self) -> int:
        """Most tokens of a text."""
        return int(self.model.config.max_position_embeddings)

    def token_eos(self) -> int:
        """No token ends a text."""
        return -1

    def generate(
        self, tokens: Sequence[int], top_k: int = 40, top_p: float = 0.95, min_p: float = 0.05, temp: float = 0.80,
        **settings: Any,
    ) -> Generator[int, Sequence[int] | None, None]:  # fmt: skip
        """Tokens until the reader closes the generator."""
        fault = os.environ.get("LLAMA_CPP_STAND_IN_FAULT", "")
        text, drafted = list(tokens), list[int]()
        while True:
            with torch.no_grad():
                rows = self.model(torch.tensor([text + drafted]), use_cache=False).logits[0, len(text) - 1 :]
            for place in range(len(drafted) + 1):
                row = rows[max(0, place - (fault == "root-of-another-row"))].double()
                if not temp:
                    token = int(row.argmax())
                else:
                    divisor = 1.0 if fault == "temperature-unread" else temp
                    token = int((row / divisor).softmax(-1).multinomial(1))
                if fault == "drafted-kept" and place < len(drafted):
                    token = drafted[place]
                text.append(token)
                yield token
                if place < len(drafted) and token != drafted[place]:
                    break
            drafted = [] if self.draft_model is None else self.draft_model(np.array(text)).astype(int).tolist()
