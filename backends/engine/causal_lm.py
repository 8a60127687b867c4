"""One transformers causal model as the engine uses it: a forward over rows with their own mask and positions."""

import time
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from backends.engine.attention import INTERFACE, Attend


class CausalLm:
    """A causal model with a clock on its forwards.

    Attributes:
        windows: Sliding window of each layer in tokens, 0 for none.
        forward_s: Seconds spent in forwards since the model was loaded, device synchronised.
        calls: Forwards since the model was loaded.
    """

    def __init__(self, model: Any, device: str) -> None:
        self.model = model
        self.device = torch.device(device)
        self.dtype: torch.dtype = next(model.parameters()).dtype
        model.set_attn_implementation(INTERFACE)
        config = model.config
        kinds = getattr(config, "layer_types", None) or []
        window = getattr(config, "sliding_window", None) or 0
        layers = config.num_hidden_layers
        self._kinds: list[str] = list(kinds)
        self.windows = [window if kind == "sliding_attention" else 0 for kind in kinds] if kinds else [window] * layers
        self.forward_s = 0.0
        self.calls = 0

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, positions: Tensor, visible: list[Tensor], cache: DynamicCache, attend: Attend, score: int
    ) -> Tensor:
        """Run R rows, appending their KV to `cache`.

        Args:
            tokens: int64 [R].
            positions: int64 [R]; where rotary embedding puts each row.
            visible: bool [R, C] for each layer, C = cached columns + R.
            cache: Grows by R columns in every layer.
            attend: The attention to run.
            score: How many rows, counted from the last, the head scores; prefill needs none.

        Returns:
            Logits [score, vocabulary] in the working dtype; empty for 0.
        """
        masks: Any = visible[0][None, None].to(self.device)
        if self._kinds:
            masks = {kind: visible[self._kinds.index(kind)][None, None].to(self.device) for kind in set(self._kinds)}
        began = time.perf_counter()
        runner = self.model if score else self.model.base_model
        output = runner(
            input_ids=tokens[None].to(self.device),
            position_ids=positions[None].to(self.device),
            attention_mask=masks,
            past_key_values=cache,
            use_cache=True,
            attend=attend,
            **({"logits_to_keep": score} if score else {}),
        )
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.forward_s += time.perf_counter() - began
        self.calls += 1
        scored: Tensor = output.logits[0] if score else torch.empty(0)
        return scored

    def prefill(self, tokens: tuple[int, ...], cache: DynamicCache, attend: Attend, chunk: int) -> None:
        """Append the KV of `tokens` to `cache` as one causal run, `chunk` tokens per forward (0: all at once)."""
        start = cached_length(cache)
        width = chunk or max(len(tokens), 1)
        for at in range(0, len(tokens), width):
            part = torch.tensor(tokens[at : at + width])
            rows = torch.arange(start + at, start + at + len(part))
            self.forward(part, rows, causal(rows, self.windows), cache, attend, score=0)


def cached_length(cache: DynamicCache) -> int:
    """Columns in `cache`."""
    return int(cache.get_seq_length()) if cache.layers else 0


def causal(rows: Tensor, windows: list[int]) -> list[Tensor]:
    """For each layer, bool [R, C]: rows at positions `rows` see columns 0..position, inside the layer's window."""
    columns = torch.arange(int(rows[-1]) + 1)
    seen = {window: in_window(columns[None] <= rows[:, None], rows, columns, window) for window in set(windows)}
    return [seen[window] for window in windows]


def in_window(visible: Tensor, rows: Tensor, columns: Tensor, window: int) -> Tensor:
    """Hide from `visible` [R, C] what lies `window` or more positions back, by logical position; 0 hides nothing."""
    return visible & (columns[None] > rows[:, None] - window) if window else visible
