"""Layout TND of npu_fused_infer_attention_score, emulated on the CPU.

The rows of all requests follow one another without a batch axis. The layout takes only the compressed causal mask, so
it cannot express a tree.
"""

from itertools import pairwise

import torch
from torch import Tensor

from specverify.backends.ascend.operators.fused_infer.call import Call
from specverify.backends.ascend.operators.masked import attend, check_compressed, mode_mask
from specverify.backends.ascend.operators.pages import cache_of
from specverify.backends.ascend.operators.rules import demand


def ragged_attention(call: Call) -> tuple[Tensor, Tensor]:
    """The output [T, N, D], and the log-sum-exp, float32 [T, N, 1]."""
    query = call.query
    table = call.block_table
    mode = call.sparse_mode
    total, heads, dim = query.shape
    demand(heads == call.num_heads, "fia.heads", f"num_heads({call.num_heads}) != N({heads}) of the query")
    lengths, key_ends = call.actual_seq_lengths, call.actual_seq_lengths_kv
    lacks_lengths = lengths is None or key_ends is None
    demand(not lacks_lengths, "fia.tnd-lengths", "When layout is TND, actualSequenceLengthQ and KV are required")
    assert lengths is not None
    assert key_ends is not None
    ends, key_ends = [int(end) for end in lengths], [int(end) for end in key_ends]
    _check_cumulative(ends, total, "query", "Q")
    message = f"When layout is TND, queryD({dim}) must be 192, 128 or 64"
    demand(dim in (64, 128, 192), "fia.tnd-head-dim", message)
    message = f"When Layout is TND, sparseMode only support 0,3 or 4, but sparseMode = {mode}"
    demand(mode in (0, 3, 4), "fia.tnd-sparse", message)
    message = "When Layout is TND, sparseMode = 0 not support attentionMask."
    demand(mode != 0 or call.atten_mask is None, "fia.tnd-mask", message)
    if mode:
        check_compressed(call.atten_mask, mode, "fia")
    begins = [0, *ends[:-1]]
    if table is None:
        _check_cumulative(key_ends, call.key.shape[0], "key", "KV")
        columns = [
            tuple(tensor[begin:end].transpose(0, 1) for tensor in (call.key, call.value))
            for begin, end in zip([0, *key_ends[:-1]], key_ends, strict=True)
        ]
    else:
        _check_table(table, len(ends), call.block_size, key_ends)
        cache = cache_of(call.key, call.value, call.kv_heads, dim, call.block_size, "TND")
        columns = [cache.columns(table[lane], length) for lane, length in enumerate(key_ends)]
    out = torch.zeros_like(query)
    # A request without rows or keys keeps these values.
    lse = torch.full((total, heads, 1), float("inf"))
    for lane, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        key, value = columns[lane]
        rows = end - begin
        width = key.shape[1]
        if not rows or not width:
            continue
        message = f"When layout is TND and sparse = 3 ,Batch[{lane}], need s1[{rows}] <= s2[{width}]."
        demand(mode != 3 or rows <= width, "fia.tnd-rows", message)
        # Mode 0 takes no mask in this layout, so it has no band either.
        hidden = mode_mask(mode, rows, width, call.pre_tokens, call.next_tokens, False)
        lane_out, lane_lse = attend(
            query[begin:end].transpose(0, 1), key, value, hidden, call.scale, call.inner_precise, "fia"
        )
        out[begin:end] = lane_out.transpose(0, 1)
        lse[begin:end, :, 0] = lane_lse.transpose(0, 1)
    return out, lse


def _check_cumulative(ends: list[int], total: int, symbol: str, suffix: str) -> None:
    """Refuse lengths that do not rise to the number of tokens: in TND, an entry is the end of a request."""
    rising = all(end <= next_end for end, next_end in pairwise(ends)) and ends[-1:] == [total]
    message = (
        f"When layout is TND, {symbol}T({total}) must be equal to the last element of actualSequenceLength{suffix}"
        f"({ends[-1] if ends else None}), which is cumulative"
    )
    demand(rising, "fia.tnd-cumulative", message)


def _check_table(table: Tensor, batch: int, size: int, key_ends: list[int]) -> None:
    """Check the block table of a call in layout TND, which has block sizes of its own."""
    demand(table.dtype == torch.int32, "fia.table-int32", f"blockTable only support int32, got {table.dtype}")
    message = f"the block table must be (B = {batch}, blocks), but is {list(table.shape)}"
    demand(table.dim() == 2 and table.shape[0] == batch, "fia.table-shape", message)
    message = f"dims of actualSeqLenKV({len(key_ends)}) should be equal to batch({batch}) when PA enable"
    demand(len(key_ends) == batch, "fia.lengths-count", message)
    message = f"block size({size}) should be a multiple of 16, at most 1024, in layout TND"
    demand(0 < size <= 1024 and size % 16 == 0, "fia.block-size", message)
