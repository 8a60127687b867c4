"""Eager attention: scores, mask, softmax and weighted sum written out in torch.

Every fused path is compared with it, and a path that has no kernel for an input falls back to it.
"""

import torch
from torch import Tensor

from specverify.backends.engine.columns import AttentionInputs


def eager(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """Softmax attention over the visible columns, written out; see `columns.Attend`.

    The query heads of one group share a KV head. The score of a hidden column is minus infinity, so its weight is
    exactly 0. A row that sees no column becomes NaN, which is noticed; a finite floor in place of minus infinity would
    return the mean of all values unnoticed. The softmax runs in float32 for 16-bit inputs, as in transformers' eager
    attention, and in the working dtype otherwise. A soft cap is computed in the dtype of the query, as in Gemma 2's
    eager attention. A sink is one score more of each row (gpt-oss).
    """
    groups = query.shape[1] // columns.key.shape[1]
    key, value = columns.key, columns.value
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2)) * scaling
    if columns.cap:
        scores = torch.tanh(scores / columns.cap) * columns.cap
    scores = scores.masked_fill(~columns.visible, float("-inf"))
    softmax_dtype = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype
    if columns.sinks is not None:
        # One column more, whose share of the softmax is dropped.
        sink_scores = columns.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink_scores], -1)
        return torch.softmax(scores, -1, dtype=softmax_dtype)[..., :-1].to(query.dtype) @ value
    return torch.softmax(scores, -1, dtype=softmax_dtype).to(query.dtype) @ value
