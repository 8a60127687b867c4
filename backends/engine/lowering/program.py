"""The lowering of trees by tensor operations, without a transfer to the host.

Every function takes the trees of B requests, padded to N rows. Loops run over levels, whose number the host knows from
the drafted trees; nothing reads a number of a tensor, so that no call waits for the device. `lower_tree` writes the
same numbers on the host, tree by tree.
"""

import torch
from torch import Tensor

from backends.engine.columns import WORD, signed
from backends.engine.reach import Reach


def climbed(parent: Tensor, levels: int) -> Tensor:
    """The ancestor of each row that lies k levels above it, int64 [levels + 1, B, N]; the root stays at the root."""
    lifts = [torch.arange(parent.shape[1], device=parent.device).expand_as(parent)]
    for _ in range(levels):
        lifts.append(parent.gather(1, lifts[-1]))
    return torch.stack(lifts)


def depths(lift: Tensor, valid: Tensor) -> Tensor:
    """The depth of each row, int64 [B, N]: the number of `climbed` levels at which the row is not at the root yet."""
    return (lift != 0).sum(0) * valid


def ancestors(lift: Tensor, depth: Tensor, valid: Tensor) -> Tensor:
    """The ancestor of each row at each depth, int64 [B, N, levels + 1]; 0 below the row and for padding rows."""
    level = torch.arange(len(lift), device=lift.device)
    climb = depth[..., None] - level
    # `climbed` counts levels from the row, this table counts depths from the root.
    found = lift.permute(1, 2, 0).gather(2, climb.clamp(min=0))
    return torch.where((climb >= 0) & valid[..., None], found, 0)


def first_children(parent: Tensor, own: Tensor) -> Tensor:
    """The first child of each row in row order, int64 [B, N], 0 for none; `own` marks rows below a root."""
    rows = parent.shape[1]
    row = torch.arange(rows, device=parent.device).expand_as(parent)
    none = torch.full_like(parent, rows)
    first = none.scatter_reduce(1, parent, torch.where(own, row, rows), "amin")
    return torch.where(first == rows, 0, first)


def next_siblings(parent: Tensor, own: Tensor) -> Tensor:
    """The next row with the same parent, int64 [B, N], 0 for none; `own` marks rows below a root."""
    rows = parent.shape[1]
    row = torch.arange(rows, device=parent.device)
    # In order of (parent, row) the next sibling of a row stands right behind it; other rows go to the end.
    order = torch.where(own, parent * rows + row, rows * rows + row).argsort(1)
    above = torch.where(own, parent, -1).gather(1, order)
    follows = (above[:, 1:] == above[:, :-1]) & (above[:, 1:] >= 0)
    behind = torch.where(follows, order[:, 1:], 0)
    return torch.zeros_like(parent).scatter(1, order[:, :-1], behind)


def block_words(ancestor: Tensor, depth: Tensor, position: Tensor, valid: Tensor, reach: Reach) -> Tensor:
    """The rows of the block that each row sees, as int32 words [B, N, W]: its ancestors in `reach`, and itself."""
    batch, rows, levels = ancestor.shape
    row = torch.arange(rows, device=ancestor.device)
    seen = torch.where(valid[..., None], ancestor, row[:, None])  # a padding row sees itself, at level 0
    there = torch.arange(levels, device=ancestor.device) <= depth[..., None]
    above = position.gather(1, seen.flatten(1)).view_as(seen)
    there = reach.within(there[..., None, :], position[..., None], above)[..., 0, :]
    # The ancestors of a row are different rows, so that a sum of their bits sets each of them.
    bits = torch.where(there, 1 << seen % WORD, 0)
    words = torch.zeros(batch, rows, -(-rows // WORD), dtype=torch.int64, device=ancestor.device)
    return signed(words.scatter_add(2, seen // WORD, bits))


def first_columns(position: Tensor, valid: Tensor, committed: Tensor, reach: Reach) -> Tensor:
    """The first committed column that each row sees, int32 [B, N]; `committed` [B] for a row that sees none."""
    begin = torch.zeros_like(position)
    if reach.chunk:
        begin = position - position % reach.chunk
    elif reach.window:
        begin = (position - reach.window + 1).clamp(min=0)
    ends = committed[:, None].expand_as(begin)
    return torch.where(valid, torch.minimum(begin, ends), ends).int()
