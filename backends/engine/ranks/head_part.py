"""A draft's head of which one rank holds a part.

A part has heads and inner width of the layers, and ids of the vocabulary: the head's own, which may be smaller than the
target's, split among the draft's ranks.
"""

from copy import copy

import torch
from torch import Tensor

from specverify.backends.engine.collectives import Group, RankSeams
from specverify.backends.engine.kv.base import CacheSpec
from specverify.backends.engine.model.head import HeadModel
from specverify.reference.parallel import kv_part, rank_part

INPUTS = ("o_proj", "down_proj")
"""The projections of which a rank holds inputs, so that their products are summed."""

OUTPUTS = ("gate_proj", "up_proj")
"""The projections of which a rank holds outputs, beside those to queries, keys and values."""


class HeadPart(HeadModel):
    """The part of one rank; `part_of_head` makes it of a whole head, of which it has everything else."""

    group: Group
    rank_seams: RankSeams

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `HeadModel`."""
        if not name.endswith(INPUTS):
            return super().linear(x, name)
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        return self.rank_seams.partial(self.group, x, weight, bias, name)

    def unembed(self, normed: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `HeadModel`; each rank scores its own ids."""
        ids = slice(*rank_part(len(weight), self.group.rank, self.group.size))
        logits = torch.nn.functional.linear(normed, weight[ids], None if bias is None else bias[ids])
        return self.rank_seams.gather_logits(self.group, logits, len(weight))

    def room(self, capacity: int, rows: int) -> CacheSpec:
        """See `HeadModel`."""
        layer = self.layer
        first, end = kv_part(layer.kv_heads, self.group.rank, self.group.size)
        return CacheSpec(tuple(self.reaches), end - first, layer.head_dim, capacity, rows, self.device, self.dtype)


def part_of_head(head: HeadModel, group: Group, ranks: RankSeams) -> HeadModel:
    """The part of rank `group.rank` of a head whose layers are plain; counters begin anew."""
    part = copy(head)
    part.__class__ = type(f"{type(head).__name__}Part", (HeadPart, type(head)), {})
    assert isinstance(part, HeadPart)
    part.group = group
    part.rank_seams = ranks
    part.weights = {name: _own_part(head, name, tensor, group) for name, tensor in head.weights.items()}
    part.forward_s = 0.0
    part.calls = part.attention_calls = 0
    part.fallbacks = type(head.fallbacks)()
    return part


def _own_part(head: HeadModel, name: str, tensor: Tensor, group: Group) -> Tensor:
    """The rows or columns of the tensor `name` that rank `group.rank` holds."""
    projection, _, kind = name.rpartition(".")
    layer = head.layer
    heads = {
        "q_proj": rank_part(layer.heads, group.rank, group.size),
        "k_proj": kv_part(layer.kv_heads, group.rank, group.size),
        "v_proj": kv_part(layer.kv_heads, group.rank, group.size),
    }
    last = projection.rpartition(".")[2]
    if last in heads:
        first, end = heads[last]
        return tensor[first * layer.head_dim : end * layer.head_dim]
    if last in OUTPUTS:
        return tensor[slice(*rank_part(len(tensor), group.rank, group.size))]
    if last == "o_proj" and kind == "weight":
        first, end = heads["q_proj"]
        return tensor[:, first * layer.head_dim : end * layer.head_dim]
    if last == "down_proj" and kind == "weight":
        return tensor[:, slice(*rank_part(tensor.shape[1], group.rank, group.size))]
    return tensor
