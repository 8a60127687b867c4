"""The KV caches of a batch whose lanes are padded on the left.

So transformers batches prompts of unequal length. Every lane ends at the same column. Dead columns stand in front of
a shorter one, which hold a large number and which no row sees. Rows keep the positions that they have alone.
"""

import torch
from torch import Tensor

from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.kv.lanes import BatchCache

DEAD = 3e4
"""The content of dead columns: finite in every working dtype, and far from any key or value."""


class LeftPadded(BatchCache):
    """The caches of one forward, with dead columns in front of each lane.

    Attributes:
        front: Dead columns in front of the widest lane.
    """

    front = 0

    def _stack(self, lanes: list[Tensor]) -> Tensor:
        """Stack the lanes to [B, kv_heads, front + widest, head_dim], each at the right end."""
        heads, _, head_dim = lanes[0].shape
        widest = max(tensor.shape[1] for tensor in lanes)
        stacked = lanes[0].new_full((len(lanes), heads, self.front + widest, head_dim), DEAD)
        for lane, tensor in enumerate(lanes):
            stacked[lane, :, stacked.shape[2] - tensor.shape[1] :] = tensor
        return stacked

    def masks(self, layer: int, visible: list[Tensor]) -> Tensor:
        """As `BatchCache.masks`, with the columns of each lane behind its dead columns, which are closed."""
        lanes = []
        for cache, rows, visible_columns in zip(self.caches, self.rows, visible, strict=True):
            num_padding = self.width - rows
            mask = torch.nn.functional.pad(
                cache.cell_mask(layer, visible_columns), (0, num_padding, 0, num_padding), value=False
            )
            padding = torch.arange(num_padding)
            mask[rows + padding, mask.shape[1] - num_padding + padding] = True
            lanes.append(mask)
        dead = self.dead_columns([mask.shape[1] for mask in lanes])
        return torch.stack([self.close_columns(mask, pad) for mask, pad in zip(lanes, dead, strict=True)])[:, None]

    def dead_columns(self, widths: list[int]) -> list[int]:
        """The number of dead columns in front of each lane, whose own columns are `widths`."""
        return [self.front + max(widths) - width for width in widths]

    def close_columns(self, mask: Tensor, dead: int) -> Tensor:
        """The mask [rows, columns] of one lane with `dead` closed columns in front."""
        return torch.nn.functional.pad(mask, (dead, 0), value=False)

    def columns(self, layer: int, key: Tensor, value: Tensor, visible: Tensor) -> AttentionInputs:
        """See `BatchCache.columns`; the dead columns are part of a prefix whose beginning no row sees."""
        committed = [cache.length - cache.first(layer) for cache in self.caches]
        lanes = zip(self.caches, self.rows, strict=True)
        widths = [cache.read(layer)[0].shape[1] + self.width - rows for cache, rows in lanes]
        prefix_lengths = [pad + length for pad, length in zip(self.dead_columns(widths), committed, strict=True)]
        prefix = torch.tensor(prefix_lengths, dtype=torch.int32)
        return AttentionInputs(key, value, visible, prefix, None, self.fallbacks.append)


_CLASSES: dict[tuple[type[LeftPadded], int], type[LeftPadded]] = {}


def with_front(kind: type[LeftPadded], front: int) -> type[LeftPadded]:
    """The class `kind` with `front` dead columns in front of the widest lane; one class for equal arguments."""
    if (kind, front) not in _CLASSES:
        _CLASSES[kind, front] = type(kind.__name__, (kind,), {"front": front, "__doc__": kind.__doc__})
    return _CLASSES[kind, front]
