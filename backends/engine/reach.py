"""The reach of a layer: full attention, a sliding window, or chunked attention.

Reach is defined over logical positions, not over columns of a cache: siblings of a tree share a position.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specverify.backends.base import Unsupported

RECURRENT = ("linear_attention", "conv")
"""The kinds of layers that have a recurrent state in place of attention, under transformers' names."""

HYBRID = ("hybrid",)
"""The kinds of layers that have a recurrent state beside attention."""

MASKS = {"hybrid": ("full_attention", "linear_attention")}
"""The names under which transformers looks up the masks of a kind of layer, where they are not the kind itself."""


@dataclass(frozen=True)
class Reach:
    """The reach of one layer.

    Attributes:
        window: The number of tokens that a row sees, itself included; 0 for no window.
        chunk: The length of a chunk. A row at position p sees only tokens of chunk p // chunk; 0 for no chunks.
    """

    window: int = 0
    chunk: int = 0

    def within(self, visible: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return `visible`, bool [..., R, C], with the columns out of reach hidden.

        `rows` [..., R] and `columns` [..., C] are the positions of rows and columns.
        """
        row, column = rows[..., :, None], columns[..., None, :]
        if self.chunk:
            return visible & (column // self.chunk == row // self.chunk)
        return visible & (column > row - self.window) if self.window else visible

    @property
    def span(self) -> int:
        """The largest number of tokens that a row sees, itself included; 0 for no limit."""
        return self.window or self.chunk

    def first(self, position: int) -> int:
        """The first position that a row at `position`, or any later row, can see."""
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
    reaches = {
        "full_attention": Reach(),
        # An indexer chooses among all columns.
        "indexed_attention": Reach(),
        # A layer with a recurrent state: its columns are zeros, and nothing attends to them.
        **dict.fromkeys((*RECURRENT, *HYBRID), Reach()),
        "sliding_attention": Reach(window=window),
        "chunked_attention": Reach(chunk=chunk),
    }
    for kind in kinds:
        if kind not in reaches:
            raise Unsupported(f"layers of kind {kind}: this engine has {', '.join(reaches)}")
    # A config without `layer_types` (Mistral) has one window for all layers.
    return [reaches[kind] for kind in kinds] if kinds else [Reach(window)] * config.num_hidden_layers
