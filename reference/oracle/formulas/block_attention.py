"""Causal attention of the last rows of one text, all of them at once."""

import numpy as np

from specverify.reference.oracle.formulas.layer import first_visible, soft_cap
from specverify.reference.trace import Array


def block_attention(
    queries: Array,
    keys: Array,
    values: Array,
    reach: tuple[int, int],
    cap: float,
    sinks: Array | None,
    chosen: Array | None = None,
) -> Array:
    """Causal attention of the last T rows: queries [heads, T, d], keys and values [kv_heads, end, d], T <= end.

    Queries are scaled already. `reach`, `cap` and `sinks` are the layer's window and chunk, the soft cap of its scores,
    and the sink of each head; `chosen`, bool [T, end], the columns of each row where an indexer chose them.
    """
    heads, rows, width = queries.shape
    kv_heads, end, _ = keys.shape
    row = np.arange(end - rows, end)[:, None]
    begin = np.array([[first_visible(reach, position)] for position in range(end - rows, end)])
    first = int(begin[0, 0])  # no later row sees a column before this one
    column = np.arange(first, end)
    hidden = (column > row) | (column < begin)
    hidden = hidden if chosen is None else hidden | ~chosen[:, first:]
    grouped = queries.reshape(kv_heads, -1, width)
    scores = soft_cap((grouped @ keys[:, first:].swapaxes(1, 2)).reshape(heads, rows, -1), cap)
    scores += np.where(hidden, -np.inf, 0.0)
    peak = scores.max(axis=-1, keepdims=True)
    sink_scores = np.array(-np.inf) if sinks is None else sinks[:, None, None]
    peak = np.maximum(peak, sink_scores)
    scores -= peak
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True) + np.exp(sink_scores - peak)
    mixed: Array = scores.reshape(kv_heads, -1, end - first) @ values[:, first:]
    return mixed.reshape(heads, rows, -1)
