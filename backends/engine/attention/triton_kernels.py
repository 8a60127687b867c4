"""The Triton kernels of tree attention, as undecorated Python functions.

`triton_launch` compiles them for a GPU, or runs them under Triton's interpreter. `tl.reduce` is called with Triton's
own combining functions, because `tl.max` and `tl.sum` are compiled functions that the interpreter cannot call unless
TRITON_INTERPRET was set before Triton was imported.
"""

import triton.language as tl

FLOOR = tl.constexpr(-3.0e38)
"""The running maximum before any column; finite, because minus infinity less minus infinity would be NaN."""


def tree(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    table,
    sinks,
    first,
    prefixes,
    widths,
    bits,
    out,
    lse,
    query_lane,
    query_head,
    query_row,
    page_step,
    cell_step,
    head_step,
    pages,
    size,
    rows,
    words,
    kv_heads,
    scaling,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTLY: tl.constexpr,
    WIDEN: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Compute attention for one tile of rows of one KV head: over all columns, one split of the prefix, or the block.

    The GROUP query heads that share a KV head are rows of one tile: row r is query head r // rows, tree row r % rows.
    With SPLITS 0, a program takes prefix and block and writes the attention itself. Otherwise program s takes the s-th
    part of the prefix and program SPLITS takes the block; each writes its softmax and log-sum-exp, in float32, for
    `merge`. The softmax runs over tiles of columns: `top` is the running maximum, `total` the running sum of weights
    and `mixed` the running weighted sum of values. A sink is a score without a value, one for each query head; of the
    programs with SPLITS, that of the block adds it.
    """
    # int64, because offsets into a large pool of pages may exceed 32 bits.
    lane = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = (tl.program_id(0) % kv_heads).to(tl.int64)
    part = tl.program_id(2)
    flat = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # `rows` may be a plain number: the JIT makes an argument of value 1 a constant, which has no `.to`.
    real = flat < rows * GROUP
    row = flat % rows
    query_at = head * GROUP + flat // rows
    own_row = lane * rows + row
    # A tile's width is a power of two; the dimensions beyond DIM are loaded as zeros and never stored.
    dim = tl.arange(0, WIDE)
    inside = (dim < DIM)[None, :]
    block = tl.arange(0, TILE)
    q = tl.load(
        query + (lane * query_lane + query_at * query_head + row * query_row)[:, None] + dim[None, :],
        mask=real[:, None] & inside,
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)
    across = (head * head_step + dim)[None, :]
    block_table = table + lane * pages
    prefix = tl.load(prefixes + lane)
    top = tl.full([ROWS], FLOOR, tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    mixed = tl.full([ROWS, WIDE], 0.0, tl.float32)

    low = 0
    high = prefix
    if SPLITS > 0:
        # The share of a split is a whole number of tiles.
        split_columns = (prefix + SPLITS * TILE - 1) // (SPLITS * TILE) * TILE
        low = part * split_columns  # the block's program begins at the end of the prefix or after it
        high = tl.minimum(low + split_columns, prefix)
    if PARTLY:
        # Tiles before the first column that any row of the tile sees are skipped.
        start = tl.load(first + own_row)
        low = tl.maximum(low, tl.reduce(start, 0, tl.standard._elementwise_min) // TILE * TILE)
    for begin in range(low, high, TILE):
        column = tl.add(begin, block, sanitize_overflow=False)
        valid = column < high
        page = tl.load(block_table + column // size, mask=valid, other=0).to(tl.int64)
        cells = (page * page_step + (column % size).to(tl.int64) * cell_step)[:, None] + across
        read = valid[:, None] & inside
        k = tl.load(key + cells, mask=read, other=0.0)
        v = tl.load(value + cells, mask=read, other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
        # "ieee": float32 stays float32, where Triton's default rounds to TF32.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        visible = valid[None, :]
        if PARTLY:
            visible = visible & (column[None, :] >= start[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.reduce(scores, 1, tl.standard._elementwise_max))
        weights = tl.exp(scores - higher[:, None])
        # Earlier sums were relative to the old maximum.
        keep = tl.exp(top - higher)
        total = total * keep + tl.reduce(weights, 1, tl.standard._sum_combine)
        # Weights are rounded to the dtype of the values even where they are widened again: both ways round alike.
        weights = weights.to(v.dtype)
        if WIDEN:
            weights, v = weights.to(tl.float32), v.to(tl.float32)
        mixed = mixed * keep[:, None] + tl.dot(weights, v, input_precision="ieee")
        top = higher

    width = tl.load(widths + lane)
    if SPLITS > 0:
        width = tl.where(part == SPLITS, width, 0)  # the other programs have the prefix alone
    ancestors = (bits + own_row * words)[:, None]
    for begin in range(0, width, TILE):
        place = tl.add(begin, block, sanitize_overflow=False)
        valid = place < width
        column = tl.add(prefix, place, sanitize_overflow=False)
        page = tl.load(block_table + column // size, mask=valid, other=0).to(tl.int64)
        cells = (page * page_step + (column % size).to(tl.int64) * cell_step)[:, None] + across
        read = valid[:, None] & inside
        k = tl.load(key + cells, mask=read, other=0.0)
        v = tl.load(value + cells, mask=read, other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
        word = tl.load(ancestors + (place // 32)[None, :], mask=valid[None, :], other=0)
        visible = ((word >> (place % 32)[None, :]) & 1) == 1
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.reduce(scores, 1, tl.standard._elementwise_max))
        weights = tl.exp(scores - higher[:, None])
        keep = tl.exp(top - higher)
        total = total * keep + tl.reduce(weights, 1, tl.standard._sum_combine)
        weights = weights.to(v.dtype)
        if WIDEN:
            weights, v = weights.to(tl.float32), v.to(tl.float32)
        mixed = mixed * keep[:, None] + tl.dot(weights, v, input_precision="ieee")
        top = higher

    if SINKS:
        sink = tl.load(sinks + query_at, mask=real, other=float("-inf"))
        if SPLITS > 0:
            sink = tl.where(part == SPLITS, sink, float("-inf"))
        higher = tl.maximum(top, sink)
        keep = tl.exp(top - higher)
        total = total * keep + tl.exp(sink - higher)
        mixed = mixed * keep[:, None]
        top = higher

    empty = total == 0.0  # a row that saw no column here: zeros, with log-sum-exp minus infinity
    mixed = mixed / tl.where(empty, 1.0, total)[:, None]
    lanes = tl.num_programs(0) // kv_heads
    place_out = ((lane + part * lanes) * kv_heads * GROUP + query_at) * rows + row
    tl.store(
        out + place_out[:, None] * DIM + dim[None, :],
        mixed.to(out.dtype.element_ty),
        mask=real[:, None] & inside,
    )
    if SPLITS > 0:
        sum_of = tl.where(empty, float("-inf"), top + tl.log(tl.where(empty, 1.0, total)))
        tl.store(lse + place_out, sum_of, mask=real)


def merge(out, lse, merged, count, PARTS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Merge PARTS softmaxes [PARTS, count, DIM] over disjoint columns by their log-sum-exps [PARTS, count]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    real = row < count
    dim = tl.arange(0, WIDE)
    stored = real[:, None] & (dim < DIM)[None, :]
    top = tl.full([ROWS], FLOOR, tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    mixed = tl.full([ROWS, WIDE], 0.0, tl.float32)
    for part in range(PARTS):
        place = row + part * count
        part_lse = tl.load(lse + place, mask=real, other=float("-inf"))
        higher = tl.maximum(top, part_lse)
        keep = tl.exp(top - higher)
        weight = tl.exp(part_lse - higher)
        total = total * keep + weight
        mixed = mixed * keep[:, None] + weight[:, None] * tl.load(
            out + place[:, None] * DIM + dim[None, :], mask=stored, other=0.0
        )
        top = higher
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(merged + row[:, None] * DIM + dim[None, :], mixed.to(merged.dtype.element_ty), mask=stored)
