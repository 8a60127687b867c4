"""Attention written out: every path is compared with it, and slower ones fall back to it."""

import torch
from torch import Tensor

from backends.engine.columns import AttentionInputs


def eager(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """Softmax attention over the visible columns, written out; see `columns.Attend`.

    Grouped queries share a KV head. Hidden columns get minus infinity, hence weight 0 exactly; a row that sees nothing
    is NaN, which is loud, where a finite floor would be a silent mean. The softmax runs in float32 for 16-bit inputs,
    as transformers' eager attention does, and in the working dtype otherwise. A soft cap is computed in the dtype of
    the query, as Gemma 2's eager attention does.
    """
    groups = query.shape[1] // columns.key.shape[1]
    key, value = columns.key.repeat_interleave(groups, 1), columns.value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2)) * scaling
    if columns.cap:
        scores = torch.tanh(scores / columns.cap) * columns.cap
    scores = scores.masked_fill(~columns.visible, float("-inf"))
    wide = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype
    return torch.softmax(scores, -1, dtype=wide).to(query.dtype) @ value
