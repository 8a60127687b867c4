"""Attention split at the end of the prefix, in plain torch.

Attention over the prefix and attention over the block are computed separately, then merged by their log-sum-exps.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specverify.backends.engine.attention.compact import Compact, compact
from specverify.backends.engine.attention.gathered import eager_gathered
from specverify.backends.engine.columns import Attend, AttentionInputs

Partial = tuple[Tensor, Tensor]
"""Softmax over some columns [..., D] and the log-sum-exp of their scores [...]; zeros, minus infinity for no column."""

Keys = tuple[Tensor, Tensor]
"""Keys and values [kv_heads, columns, head_dim] of some columns of one lane."""


def prefix_keys(columns: AttentionInputs, lane: int, packed: Compact) -> Keys:
    """Keys and values of a lane's prefix, gathered already or read from its pages, and no cell beyond the prefix."""
    return _columns(columns, lane, 0, packed.lanes[lane][0])


def block_keys(columns: AttentionInputs, lane: int, packed: Compact) -> Keys:
    """Keys and values of a lane's block, which follows its prefix."""
    prefix, width, _ = packed.lanes[lane]
    return _columns(columns, lane, prefix, prefix + width)


def _columns(columns: AttentionInputs, lane: int, begin: int, end: int) -> Keys:
    paging = columns.paging
    if paging is None:
        return columns.key[lane, :, begin:end], columns.value[lane, :, begin:end]
    place = torch.arange(begin, end, device=paging.table.device)
    slot = paging.table[lane].index_select(0, place // paging.size) * paging.size + place % paging.size
    # Contiguous per head, as gathered columns are: the bits of a matrix product depend on strides.
    keys, values = (
        cells.flatten(0, 1).transpose(0, 1).index_select(1, slot) for cells in (paging.key_cells, paging.value_cells)
    )
    return keys, values


def partial(query: Tensor, keys: Keys, hidden: Tensor | None, scaling: float) -> Partial:
    """Softmax of `query` [kv_heads, R, D] over `keys`, in the dtype of `query`, which is float32 or float64.

    The row's highest visible score is subtracted before the exponential, so neither side of a merge overflows. Columns
    in `hidden`, bool [R, columns], have a weight of exactly 0.
    """
    key, value = (tensor.to(query.dtype) for tensor in keys)
    scores = query @ key.transpose(-1, -2) * scaling
    if hidden is not None:
        scores = scores.masked_fill_(hidden, float("-inf"))
    if not scores.shape[-1]:  # no columns at all: `amax` has no value there
        zeros = query.new_zeros((*query.shape[:-1], value.shape[-1]))
        return zeros, query.new_full(query.shape[:-1], float("-inf"))
    top = scores.amax(-1, keepdim=True)
    # If every column is hidden, minus infinity less itself would be NaN; against base 0 every weight is exp(-inf) = 0.
    base = top.masked_fill(top == float("-inf"), 0.0)
    weights = scores.sub_(base).exp_()
    total = weights.sum(-1, keepdim=True)
    return (weights @ value) / total.masked_fill(total == 0, 1.0), (base + total.log())[..., 0]


def sink_part(output: Tensor, sinks: Tensor) -> Partial:
    """The part of the sinks: no output, and as log-sum-exp the sink of each row's head.

    Args:
        output: The output of another part, [kv_heads, R, width of values]; the rows of a KV head are its query heads
            one after the other.
        sinks: [H].
    """
    sink_rows = sinks.to(output.dtype).view(len(output), -1)
    return torch.zeros_like(output), sink_rows.repeat_interleave(output.shape[1] // sink_rows.shape[1], 1)


def merge(parts: list[Partial]) -> Tensor:
    """Merge softmaxes over disjoint columns to the softmax over all columns, weighted by their log-sum-exps.

    If one part is empty, its weight is exactly 0 and the other's exactly 1. If one part dominates, nothing overflows,
    since all weights are relative to the largest log-sum-exp. A row for which all parts are empty is zeros.
    """
    sums = torch.stack([lse for _, lse in parts])
    top = sums.amax(0)
    weights = (sums - top.masked_fill(top == float("-inf"), 0.0)).exp_()
    total = weights.sum(0)
    output = sum((part * weight[..., None] for (part, _), weight in zip(parts, weights, strict=True)), start=0.0)
    assert isinstance(output, Tensor)
    return output / total.masked_fill(total == 0, 1.0)[..., None]


@dataclass(frozen=True)
class Split:
    """Attention split at the prefix, as an `Attend` with replaceable parts; see `columns.Attend`.

    It computes in float32, or in float64 for float64 inputs, and rounds once, at the end. Query heads that share a KV
    head are rows of one product, so no key is repeated. Lanes are computed one by one, each over its own columns.

    Attributes:
        compact: From query and columns to the visibility of each row.
        prefix_keys: Reads keys and values of a lane's prefix.
        block_keys: Reads keys and values of a lane's block.
        partial: Computes the softmax over some columns, and its log-sum-exp.
        merge: Merges the softmaxes of prefix and block.
        eager: The attention that replaces this one in a mode without fused attention.
        sink_part: Makes the part of the sinks of rows.
    """

    compact: Callable[[Tensor, AttentionInputs], Compact] = compact
    prefix_keys: Callable[[AttentionInputs, int, Compact], Keys] = prefix_keys
    block_keys: Callable[[AttentionInputs, int, Compact], Keys] = block_keys
    partial: Callable[[Tensor, Keys, Tensor | None, float], Partial] = partial
    merge: Callable[[list[Partial]], Tensor] = merge
    eager: Attend = eager_gathered
    sink_part: Callable[[Tensor, Tensor], Partial] = sink_part

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """Attention of `query` [B, H, T, D] over `columns`, [B, H, T, width of values], in the dtype of the query.

        Raises:
            ValueError: see `compact.compact`.
        """
        columns.refuse_cap("attention split at the prefix")
        columns.refuse_indexed("attention split at the prefix")
        packed = self.compact(query, columns)
        out = query.new_empty((*query.shape[:-1], columns.value.shape[-1]))
        for lane in range(len(query)):
            out[lane] = self._lane(query[lane], columns, lane, packed, scaling)
        return out

    def _lane(self, query: Tensor, columns: AttentionInputs, lane: int, packed: Compact, scaling: float) -> Tensor:
        prefix = self.prefix_keys(columns, lane, packed)
        block = self.block_keys(columns, lane, packed)
        kv_heads = prefix[0].shape[0]
        groups = query.shape[0] // kv_heads
        wide_query = query.to(torch.promote_types(query.dtype, torch.float32))
        rows = wide_query.reshape(kv_heads, groups * query.shape[1], query.shape[2])
        # Rows that all see the whole prefix need no mask over it.
        part = ~packed.prefix_rows(lane).repeat(groups, 1) if packed.lanes[lane][2] else None
        over_prefix = self.partial(rows, prefix, part, scaling)
        over_block = self.partial(rows, block, ~packed.block(lane).repeat(groups, 1), scaling)
        parts = [over_prefix, over_block]
        if columns.sinks is not None:
            parts.append(self.sink_part(over_block[0], columns.sinks))
        return self.merge(parts).reshape(*query.shape[:2], -1)
