"""Layout TND of npu_fused_infer_attention_score, emulated on the CPU.

The rows of all requests follow one another without a batch axis. The layout takes only the compressed causal mask, so
it cannot express a tree.
"""

from itertools import pairwise

import torch
from torch import Tensor

from backends.ascend.operators.fused_infer.call import Call
from backends.ascend.operators.masked import attend, by_mode, check_compressed
from backends.ascend.operators.pages import cache_of
from backends.ascend.operators.rules import demand


def ragged(call: Call) -> tuple[Tensor, Tensor]:
    """The output [T, N, D], and the log-sum-exp, float32 [T, N, 1]."""
    query, table, mode = call.query, call.block_table, call.sparse_mode
    total, heads, dim = query.shape
    demand(heads == call.num_heads, "fia.heads", f"num_heads({call.num_heads}) != N({heads}) of the query")
    lengths, held = call.actual_seq_lengths, call.actual_seq_lengths_kv
    missing = lengths is None or held is None
    demand(not missing, "fia.tnd-lengths", "When layout is TND, actualSequenceLengthQ and KV are required")
    assert lengths is not None
    assert held is not None
    ends, held = [int(one) for one in lengths], [int(one) for one in held]
    _check_cumulative(ends, total, "query", "Q")
    said = f"When layout is TND, queryD({dim}) must be 192, 128 or 64"
    demand(dim in (64, 128, 192), "fia.tnd-head-dim", said)
    said = f"When Layout is TND, sparseMode only support 0,3 or 4, but sparseMode = {mode}"
    demand(mode in (0, 3, 4), "fia.tnd-sparse", said)
    said = "When Layout is TND, sparseMode = 0 not support attentionMask."
    demand(mode != 0 or call.atten_mask is None, "fia.tnd-mask", said)
    if mode:
        check_compressed(call.atten_mask, mode, "fia")
    begins = [0, *ends[:-1]]
    if table is None:
        _check_cumulative(held, call.key.shape[0], "key", "KV")
        columns = [
            tuple(one[begin:end].transpose(0, 1) for one in (call.key, call.value))
            for begin, end in zip([0, *held[:-1]], held, strict=True)
        ]
    else:
        _check_table(table, len(ends), call.block_size, held)
        cache = cache_of(call.key, call.value, call.kv_heads, dim, call.block_size, "TND")
        columns = [cache.columns(table[at], length) for at, length in enumerate(held)]
    out = torch.zeros_like(query)
    # A request without rows or keys keeps these values.
    lse = torch.full((total, heads, 1), float("inf"))
    for at, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        key, value = columns[at]
        rows, width = end - begin, key.shape[1]
        if not rows or not width:
            continue
        said = f"When layout is TND and sparse = 3 ,Batch[{at}], need s1[{rows}] <= s2[{width}]."
        demand(mode != 3 or rows <= width, "fia.tnd-rows", said)
        # Mode 0 takes no mask in this layout, so it has no band either.
        hidden = by_mode(mode, rows, width, call.pre_tokens, call.next_tokens, False)
        mixed, one = attend(query[begin:end].transpose(0, 1), key, value, hidden, call.scale, call.inner_precise, "fia")
        out[begin:end], lse[begin:end, :, 0] = mixed.transpose(0, 1), one.transpose(0, 1)
    return out, lse


def _check_cumulative(ends: list[int], total: int, what: str, which: str) -> None:
    """Refuse lengths that do not rise to the number of tokens: in TND, an entry is the end of a request."""
    rising = all(one <= other for one, other in pairwise(ends)) and ends[-1:] == [total]
    said = (
        f"When layout is TND, {what}T({total}) must be equal to the last element of actualSequenceLength{which}"
        f"({ends[-1] if ends else None}), which is cumulative"
    )
    demand(rising, "fia.tnd-cumulative", said)


def _check_table(table: Tensor, batch: int, size: int, held: list[int]) -> None:
    """Check the block table of a call in layout TND, whose block sizes differ from those of other layouts."""
    demand(table.dtype == torch.int32, "fia.table-int32", f"blockTable only support int32, got {table.dtype}")
    said = f"the block table must be (B = {batch}, blocks), but is {list(table.shape)}"
    demand(table.dim() == 2 and table.shape[0] == batch, "fia.table-shape", said)
    said = f"dims of actualSeqLenKV({len(held)}) should be equal to batch({batch}) when PA enable"
    demand(len(held) == batch, "fia.lengths-count", said)
    said = f"block size({size}) should be a multiple of 16, at most 1024, in layout TND"
    demand(0 < size <= 1024 and size % 16 == 0, "fia.block-size", said)
