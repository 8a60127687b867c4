"""Reach: how far back a layer sees, by logical position: everything, a sliding window, or its own chunk."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from backends.base import Unsupported


@dataclass(frozen=True)
class Reach:
    """The reach of one layer.

    Attributes:
        window: A row sees this many tokens, itself included; 0 for no window.
        chunk: A row sees tokens of its own chunk, position // chunk, alone; 0 for no chunks.
    """

    window: int = 0
    chunk: int = 0

    def within(self, visible: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Hide from `visible` bool [..., R, C] what lies out of reach, rows and columns given by their positions."""
        row, column = rows[..., :, None], columns[..., None, :]
        if self.chunk:
            return visible & (column // self.chunk == row // self.chunk)
        return visible & (column > row - self.window) if self.window else visible

    @property
    def span(self) -> int:
        """Tokens that a row sees at most, itself included; 0 for any number."""
        return self.window or self.chunk

    def first(self, position: int) -> int:
        """The first position that a row at `position`, or a later one, can see."""
        if self.chunk:
            return position - position % self.chunk
        return max(0, position - self.window + 1) if self.window else 0


def reaches_of(config: Any) -> list[Reach]:
    """The reach of each layer of the transformers model that `config` describes.

    Raises:
        Unsupported: for a kind of layer that is not known here.
    """
    window = getattr(config, "sliding_window", None) or 0
    chunk = getattr(config, "attention_chunk_size", None) or 0
    kinds = getattr(config, "layer_types", None) or []
    known = {
        "full_attention": Reach(),
        "sliding_attention": Reach(window=window),
        "chunked_attention": Reach(chunk=chunk),
    }
    for kind in kinds:
        if kind not in known:
            raise Unsupported(f"layers of kind {kind}: this engine has {', '.join(known)}")
    return [known[kind] for kind in kinds] if kinds else [Reach(window)] * config.num_hidden_layers
