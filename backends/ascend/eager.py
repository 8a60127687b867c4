"""The attention of ascend-eager: matrix products and a softmax, written out.

It is the reference mode of the fused Ascend backends.
"""

import torch
from torch import Tensor

from specverify.backends.ascend.encodings import require_sight
from specverify.backends.engine.columns import AttentionInputs


def ascend_eager(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """Attention with a softmax in float32, where a select writes the dtype's minimum to masked scores.

    See `columns.Attend`. The mask is never added to the scores, because the addition of a boolean, or of minus
    infinity, goes wrong silently on the device. A row that sees no column is refused, because its result would be the
    mean of all values.

    Raises:
        ValueError: for a row that sees no column.
    """
    columns.refuse_cap("written-out attention for Ascend")
    columns.refuse_indexed("written-out attention for Ascend")
    columns.refuse_sinks("written-out attention for Ascend")
    require_sight(columns.visible)
    # Query heads h * groups to (h + 1) * groups - 1 share KV head h.
    groups = query.shape[1] // columns.key.shape[1]
    key, value = columns.key.repeat_interleave(groups, 1), columns.value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2)).float() * scaling
    scores = scores.masked_fill(~columns.visible, torch.finfo(torch.float32).min)
    return torch.softmax(scores, -1).to(query.dtype) @ value
