"""Attention of many rows at once, of a block of context or of a tree."""

import numpy as np

from specverify.reference.oracle.formulas.layer import soft_cap
from specverify.reference.oracle.formulas.levels import Level
from specverify.reference.oracle.formulas.reach import first_visible
from specverify.reference.trace import Array


def by_row(mixed: Array) -> Array:
    """Attention [heads, T, head_dim] as the output projection reads it: [T, heads * head_dim]."""
    rows: Array = mixed.swapaxes(0, 1).reshape(mixed.shape[1], -1)
    return rows


def block_attention(
    queries: Array, keys: Array, values: Array, reach: tuple[int, int], cap: float, sinks: Array | None
) -> Array:
    """Causal attention of the last T rows: queries [heads, T, d], keys and values [kv_heads, end, d], T <= end.

    Queries are scaled already. `reach`, `cap` and `sinks` are the layer's window and chunk, the soft cap of its scores,
    and the sink of each head.
    """
    heads, rows, width = queries.shape
    kv_heads, end, _ = keys.shape
    row = np.arange(end - rows, end)[:, None]
    begin = np.array([[first_visible(reach, position)] for position in range(end - rows, end)])
    first = int(begin[0, 0])  # no later row sees a column before this one
    column = np.arange(first, end)
    hidden = (column > row) | (column < begin)
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


def tree_attention(
    queries: Array,
    above_keys: Array,
    above_values: Array,
    keys: Array,
    values: Array,
    levels: list[Level],
    reach: tuple[int, int],
    cap: float,
    sinks: Array | None,
) -> Array:
    """Attention of every node over the context and its own path, gathered row by row; no other column is read.

    Args:
        queries: [heads, nodes, d], scaled, nodes in the order of `levels`.
        above_keys: [kv_heads, context, d], as `above_values`.
        above_values: See above_keys.
        keys: [kv_heads, nodes, d], as `values`.
        values: See keys.
        levels: The nodes by depth.
        reach: The layer's window and chunk, counted along a node's own sequence.
        cap: The soft cap of the scores, 0 for none.
        sinks: The sink of each head, [heads], or None.

    Returns:
        [heads, nodes, d].
    """
    (heads, nodes, width), (kv_heads, context, _) = queries.shape, above_keys.shape
    group = heads // kv_heads
    # [kv_heads, nodes, group, d]: one product with the context per KV head, one with the path per node.
    grouped_queries = queries.reshape(kv_heads, group, nodes, width).swapaxes(1, 2).copy()
    mixed = np.empty((*grouped_queries.shape[:-1], values.shape[-1]))
    sink_scores = np.array(-np.inf) if sinks is None else sinks.reshape(kv_heads, 1, group, 1)
    for depth, level in enumerate(levels):
        rows = slice(level.first, level.last)
        first = first_visible(reach, context + depth)  # a logical position
        path = level.paths[:, max(0, first - context) :]
        query = grouped_queries[:, rows]
        flat = query.reshape(kv_heads, -1, width)
        context_scores = soft_cap((flat @ above_keys[:, first:].swapaxes(1, 2)).reshape(*query.shape[:3], -1), cap)
        path_scores = soft_cap(query @ keys[:, path].swapaxes(2, 3), cap)
        # One softmax over context (may be empty) and path (always holds the node itself).
        peak = np.maximum(
            context_scores.max(axis=-1, keepdims=True, initial=-np.inf), path_scores.max(axis=-1, keepdims=True)
        )
        peak = np.maximum(peak, sink_scores)
        for scores in (context_scores, path_scores):
            scores -= peak
            np.exp(scores, out=scores)
        total = context_scores.sum(axis=-1, keepdims=True) + path_scores.sum(axis=-1, keepdims=True)
        total += np.exp(sink_scores - peak)
        context_values = context_scores.reshape(*flat.shape[:2], -1) @ above_values[:, first:]
        context_values = context_values.reshape(*query.shape[:3], -1)
        mixed[:, rows] = (context_values + path_scores @ values[:, path]) / total
    joined: Array = mixed.swapaxes(1, 2).reshape(heads, nodes, -1)
    return joined
