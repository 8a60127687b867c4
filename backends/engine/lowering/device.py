"""The lowering of a request's tree on a device, in place of `lower_tree`.

One copy of tokens and parents goes to the device. Everything else is computed there, without a transfer to the host:
every function takes the trees of B requests, padded to N rows. Loops run over levels, whose number the host knows from
the drafted trees; nothing reads a number of a tensor, so that no call waits for the device. `lower_tree` writes the
same numbers on the host, tree by tree.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specverify.backends.engine.columns import WORD, RowWords, signed
from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.reach import Reach
from specverify.reference.tree import Tree


def climb(parent: Tensor, levels: int) -> Tensor:
    """The ancestor of each row that lies k levels above it, int64 [levels + 1, B, N]; the root stays at the root."""
    lifts = [torch.arange(parent.shape[1], device=parent.device).expand_as(parent)]
    for _ in range(levels):
        lifts.append(parent.gather(1, lifts[-1]))
    return torch.stack(lifts)


def depths(lift: Tensor, valid: Tensor) -> Tensor:
    """The depth of each row, int64 [B, N]: the number of `climb` levels at which the row is not at the root yet."""
    return (lift != 0).sum(0) * valid


def ancestors(lift: Tensor, depth: Tensor, valid: Tensor) -> Tensor:
    """The ancestor of each row at each depth, int64 [B, N, levels + 1]; 0 below the row and for padding rows."""
    level = torch.arange(len(lift), device=lift.device)
    climb = depth[..., None] - level
    # `climb` counts levels from the row, this table counts depths from the root.
    ancestor = lift.permute(1, 2, 0).gather(2, climb.clamp(min=0))
    return torch.where((climb >= 0) & valid[..., None], ancestor, 0)


def first_children(parent: Tensor, below_root: Tensor) -> Tensor:
    """The first child of each row in row order, int64 [B, N], 0 for none; `below_root` marks rows below a root."""
    rows = parent.shape[1]
    row = torch.arange(rows, device=parent.device).expand_as(parent)
    no_child = torch.full_like(parent, rows)
    first = no_child.scatter_reduce(1, parent, torch.where(below_root, row, rows), "amin")
    return torch.where(first == rows, 0, first)


def next_siblings(parent: Tensor, below_root: Tensor) -> Tensor:
    """The next row with the same parent, int64 [B, N], 0 for none; `below_root` marks rows below a root."""
    rows = parent.shape[1]
    row = torch.arange(rows, device=parent.device)
    # In order of (parent, row) the next sibling of a row stands right behind it; other rows go to the end.
    order = torch.where(below_root, parent * rows + row, rows * rows + row).argsort(1)
    sorted_parents = torch.where(below_root, parent, -1).gather(1, order)
    follows = (sorted_parents[:, 1:] == sorted_parents[:, :-1]) & (sorted_parents[:, 1:] >= 0)
    siblings = torch.where(follows, order[:, 1:], 0)
    return torch.zeros_like(parent).scatter(1, order[:, :-1], siblings)


def block_words(ancestor: Tensor, depth: Tensor, position: Tensor, valid: Tensor, reach: Reach) -> Tensor:
    """The rows of the block that each row sees, as int32 words [B, N, W]: its ancestors in `reach`, and itself."""
    batch, rows, levels = ancestor.shape
    row = torch.arange(rows, device=ancestor.device)
    seen_rows = torch.where(valid[..., None], ancestor, row[:, None])  # a padding row sees itself, at level 0
    is_seen = torch.arange(levels, device=ancestor.device) <= depth[..., None]
    ancestor_positions = position.gather(1, seen_rows.flatten(1)).view_as(seen_rows)
    is_seen = reach.within(is_seen[..., None, :], position[..., None], ancestor_positions)[..., 0, :]
    # The ancestors of a row are different rows, so that a sum of their bits sets each of them.
    bits = torch.where(is_seen, 1 << seen_rows % WORD, 0)
    words = torch.zeros(batch, rows, -(-rows // WORD), dtype=torch.int64, device=ancestor.device)
    return signed(words.scatter_add(2, seen_rows // WORD, bits))


def first_columns(position: Tensor, valid: Tensor, committed: Tensor, reach: Reach) -> Tensor:
    """The first committed column that each row sees, int32 [B, N]; `committed` [B] for a row that sees none."""
    begin = torch.zeros_like(position)
    if reach.chunk:
        begin = position - position % reach.chunk
    elif reach.window:
        begin = (position - reach.window + 1).clamp(min=0)
    ends = committed[:, None].expand_as(begin)
    return torch.where(valid, torch.minimum(begin, ends), ends).int()


@dataclass(frozen=True)
class DeviceLowering:
    """`lower_tree` as tensor operations on `device`; the mask is `words`, and `visible` is empty.

    Attributes:
        device: The torch device.
        climb: From parents [B, N] to the ancestor of each row at each level above it.
        ancestors: From these, depths and validity to the ancestor of each row at each depth.
        block_words: From ancestors, depths, positions, validity and a reach to the words of each row.
        first_columns: From positions, validity, committed columns and a reach to the first column of each row.
        first_children: From parents and the rows below the root to the first child of each row.
        next_siblings: From the same to the next sibling of each row.
    """

    device: str
    climb: Callable[[Tensor, int], Tensor] = climb
    ancestors: Callable[[Tensor, Tensor, Tensor], Tensor] = ancestors
    block_words: Callable[[Tensor, Tensor, Tensor, Tensor, Reach], Tensor] = block_words
    first_columns: Callable[[Tensor, Tensor, Tensor, Reach], Tensor] = first_columns
    first_children: Callable[[Tensor, Tensor], Tensor] = first_children
    next_siblings: Callable[[Tensor, Tensor], Tensor] = next_siblings

    def __call__(
        self, tree: Tree, committed: int, position: int, reaches: list[Reach], padded_nodes: int
    ) -> TreeTensors:
        """See `lower_tree`; a batch of one request, whose tree the host has just drafted."""
        nodes = len(tree)
        rows = max(nodes, padded_nodes)
        padding = [0] * (rows - nodes)
        token_and_parent = torch.tensor([[*tree.token, *padding], [*tree.parent, *padding]]).to(
            self.device, non_blocking=True
        )
        token, parent = token_and_parent[:1], token_and_parent[1:]
        row = torch.arange(rows, device=self.device)
        valid = (row < nodes)[None]
        below_root = valid & (row > 0)
        lift = self.climb(parent, tree.height)
        depth = depths(lift, valid)
        ancestor = self.ancestors(lift, depth, valid)
        positions = position + depth
        ends = torch.full((1,), committed, device=self.device)
        words = {
            reach: RowWords(
                self.first_columns(positions, valid, ends, reach)[0],
                self.block_words(ancestor, depth, positions, valid, reach)[0],
                committed,
                min(reach.first(position + tree.height), committed),
                rows > nodes,
            )
            for reach in set(reaches)
        }
        return TreeTensors(
            token=token[0],
            parent=parent[0],
            depth=depth[0],
            position=positions[0],
            valid=valid[0],
            ancestor=ancestor[0],
            visible=[],
            slot=committed + row,
            next_token=self.first_children(parent, below_root)[0],
            next_sibling=self.next_siblings(parent, below_root)[0],
            retrieve_index=torch.arange(nodes, device=self.device),
            words=[words[reach] for reach in reaches],
        )
