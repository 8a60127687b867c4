"""ascend-eager: attention written out for a device that checks no index, the reference of the two modes."""

import torch
from torch import Tensor

from backends.ascend.encodings import require_sight
from backends.engine.columns import AttentionInputs


def ascend_eager(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """Softmax attention with a softmax in float32 and a select of its minimum; see `columns.Attend`.

    The mask is never added: a sum with a boolean, or with minus infinity, is what goes wrong silently there. A row
    that sees nothing would be the mean of all values, and is refused.

    Raises:
        ValueError: for a row that sees nothing.
    """
    columns.refuse_cap("written-out attention for Ascend")
    require_sight(columns.visible)
    groups = query.shape[1] // columns.key.shape[1]
    key, value = columns.key.repeat_interleave(groups, 1), columns.value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2)).float() * scaling
    scores = scores.masked_fill(~columns.visible, torch.finfo(torch.float32).min)
    return torch.softmax(scores, -1).to(query.dtype) @ value
