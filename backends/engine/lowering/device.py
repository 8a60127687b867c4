"""The lowering of a request's tree on a device, in place of `lower_tree`.

One copy of tokens and parents goes to the device. Everything else is computed there, by `program.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specverify.backends.engine.columns import RowWords
from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.lowering import program
from specverify.backends.engine.reach import Reach
from specverify.reference.tree import Tree


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
    climb: Callable[[Tensor, int], Tensor] = program.climb
    ancestors: Callable[[Tensor, Tensor, Tensor], Tensor] = program.ancestors
    block_words: Callable[[Tensor, Tensor, Tensor, Tensor, Reach], Tensor] = program.block_words
    first_columns: Callable[[Tensor, Tensor, Tensor, Reach], Tensor] = program.first_columns
    first_children: Callable[[Tensor, Tensor], Tensor] = program.first_children
    next_siblings: Callable[[Tensor, Tensor], Tensor] = program.next_siblings

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
        depth = program.depths(lift, valid)
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
