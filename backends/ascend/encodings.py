"""The three mask encodings of Ascend's operators, and checks before a launch.

The device checks neither block tables nor slots, so the checks here stand in for its own.
"""

import torch
from torch import Tensor

from specverify.backends.ascend.operators.masked import COMPRESSED_SIZE


def boolean(visible: Tensor) -> Tensor:
    """The mask of fused-infer and fusion attention: bool, contiguous, True where a key is masked out."""
    return (~visible).contiguous()


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask of ATB's splitfuse: 0 where a key is visible, minus infinity elsewhere, in the query's dtype."""
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill(~visible, float("-inf"))


def compressed_mask(device: torch.device) -> Tensor:
    """The mask of sparse modes 2, 3 and 4: the fixed causal matrix bool [2048, 2048], which cannot express a tree."""
    return torch.triu(torch.ones(COMPRESSED_SIZE, COMPRESSED_SIZE, dtype=torch.bool, device=device), 1)


def key_lengths(visible: Tensor) -> list[int]:
    """The key length of each lane: columns up to the last that any row of the lane sees, for bool [B, 1, T, C]."""
    # Numbered from 1, so that the largest seen number is a length, and 0 means that no column is seen.
    columns = torch.arange(1, visible.shape[-1] + 1, device=visible.device, dtype=torch.int32)
    return [int(length) for length in (visible.any(2)[:, 0] * columns).amax(-1).tolist()]


def require_sight(visible: Tensor) -> None:
    """Refuse rows that see no column, whose result depends on the operator: a mean, zeros or NaN.

    Raises:
        ValueError: naming the first such row.
    """
    blind = ~visible.any(-1)
    if bool(blind.any()):
        lane, _, row = blind.nonzero()[0].tolist()
        raise ValueError(f"row {row} of lane {lane} sees no column: its attention is undefined on Ascend")


def require_pages(table: Tensor, lengths: list[int], pages: int, size: int) -> None:
    """Refuse a block table that would make the device, which checks no index, read out of bounds.

    Raises:
        ValueError: for a table of another dtype than int32, an id that is no page, or too few pages.
    """
    if table.dtype != torch.int32:
        raise ValueError(f"the block table is {table.dtype}, and Ascend takes int32 alone")
    if bool(((table < 0) | (table >= pages)).any()):
        raise ValueError(f"the block table names a page outside 0 to {pages - 1}")
    if max(lengths) > table.shape[1] * size:
        raise ValueError(f"{max(lengths)} columns in {table.shape[1]} pages of {size}")


def require_slots(slots: Tensor, room: int) -> None:
    """Refuse slots that would make the device write outside the cache, or write one cell twice.

    Raises:
        ValueError: for a negative slot, a slot beyond the cache, or a repeated slot.
    """
    if not len(slots):
        return
    least, most = int(slots.min()), int(slots.max())
    if least < 0 or most >= room:
        raise ValueError(f"a slot outside 0 to {room - 1}: {least if least < 0 else most}")
    if len(torch.unique(slots)) < len(slots):
        raise ValueError("a slot is written twice")
