"""The drafted trees of a batch as padded index tensors, one tree per request."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specverify.backends.engine.uploads import upload
from specverify.reference.tree import Shape


@dataclass(frozen=True)
class Forest:
    """The trees of B requests over N rows; 0 stands for an entry that does not exist, since the root is no child.

    Attributes:
        token: int64 [B, N]; row 0 is the pending root.
        parent: int64 [B, N]; the root's parent is 0.
        children: int64 [B, N, K]; the k-th child of each node in row order.
        depth: int64 [B, N]; 0 for the root and for absent rows.
        present: bool [B, N]; whether the row exists in the request's tree.
        height: Depth of the deepest node; a Python number, so that loops over levels are static.
    """

    token: Tensor
    parent: Tensor
    children: Tensor
    depth: Tensor
    present: Tensor
    height: int

    def requests(self) -> Tensor:
        """The indices of the requests in the batch, int64 [B]."""
        return torch.arange(self.token.shape[0], device=self.token.device)

    def without(self, absent: Tensor) -> "Forest":
        """The forest without the rows `absent` [B, N] and without all rows below them."""
        for _ in range(self.height):  # one level further down in each round
            absent = absent | absent.gather(1, self.parent)
        present = self.present & ~absent
        flat = present.gather(1, self.children.flatten(1)).view_as(self.children)
        present_children = torch.where(flat, self.children, 0)
        # Children move up over the absent ones, so that the k-th child is always the k-th present child.
        order = torch.sort((present_children == 0).long(), dim=-1, stable=True).indices
        return Forest(
            self.token, self.parent, present_children.gather(-1, order), self.depth * present, present, self.height
        )


def forest(shape: Shape, token: Tensor) -> Forest:
    """The forest in which every request has a tree of this shape; `token` is int64 [B, N]."""
    batch, nodes = token.shape
    widest = max(1, max(len(below) for below in shape.children))
    table = [[*below, *[0] * (widest - len(below))] for below in shape.children]

    def spread(values: object) -> Tensor:
        table_tensor = upload(torch.tensor(values), token.device)
        return table_tensor.expand(batch, *table_tensor.shape)

    return Forest(
        token=token,
        parent=spread(shape.parent),
        children=spread(table),
        depth=spread(shape.depth),
        present=torch.ones(batch, nodes, dtype=torch.bool, device=token.device),
        height=shape.height,
    )
