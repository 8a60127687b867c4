"""Forest: one drafted tree per request of a batch, padded, with children and depths as index tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from reference.tree import Shape


@dataclass(frozen=True)
class Forest:
    """Trees of B requests over N rows; 0 stands wherever an entry does not exist, since the root is nobody's child.

    Attributes:
        token: int64 [B, N]; row 0 is the pending root.
        parent: int64 [B, N]; the root's is 0.
        children: int64 [B, N, K]; the k-th child of each node in row order.
        depth: int64 [B, N]; 0 for the root and for rows that are not there.
        present: bool [B, N].
        height: Depth of the deepest node, a number, so that loops over levels are static.
    """

    token: Tensor
    parent: Tensor
    children: Tensor
    depth: Tensor
    present: Tensor
    height: int

    def requests(self) -> Tensor:
        """Row numbers of the batch, int64 [B]."""
        return torch.arange(self.token.shape[0], device=self.token.device)

    def without(self, gone: Tensor) -> "Forest":
        """The forest whose rows `gone` [B, N], which take everything below them along, are no longer there."""
        for _ in range(self.height):
            gone = gone | gone.gather(1, self.parent)
        present = self.present & ~gone
        flat = present.gather(1, self.children.flatten(1)).view_as(self.children)
        kept = torch.where(flat, self.children, 0)
        # Holes close, so that the k-th child is always the k-th that is there.
        order = torch.sort((kept == 0).long(), dim=-1, stable=True).indices
        return Forest(self.token, self.parent, kept.gather(-1, order), self.depth * present, present, self.height)


def forest(shape: Shape, token: Tensor) -> Forest:
    """Every request with a tree of this shape; `token` is int64 [B, N]."""
    batch, nodes = token.shape
    widest = max(1, max(len(below) for below in shape.children))
    table = [[*below, *[0] * (widest - len(below))] for below in shape.children]

    def spread(values: object) -> Tensor:
        one = torch.tensor(values, device=token.device)
        return one.expand(batch, *one.shape)

    return Forest(
        token=token,
        parent=spread(shape.parent),
        children=spread(table),
        depth=spread(shape.depth),
        present=torch.ones(batch, nodes, dtype=torch.bool, device=token.device),
        height=shape.height,
    )
