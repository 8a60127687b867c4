"""ATB's _npu_paged_attention_splitfuse, emulated on the CPU.

The operator takes a ragged batch over pages, under an additive mask of its own.
"""

import torch
from torch import Tensor

from specverify.backends.ascend.operators.pages import Cache
from specverify.backends.ascend.operators.rules import demand, demand_defined

HIDING = -9984.0
"""The largest mask entry that hides a key: the documents name -inf and -10000, and -10000 is -9984 in bfloat16."""


def splitfuse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: Tensor,
) -> None:
    """Write the attention of `query` [tokens, N, D] to `out`, request by request in the order of `seq_len`.

    The mask, [tokens, at least the longest context] in the query's dtype, is added to the scores.

    Raises:
        AscendContractError, AscendUndefinedBehaviour: see `rules`.
    """
    tokens, heads, dim = query.shape
    size, kv_heads = key_cache.shape[1:3]
    half = query.dtype in (torch.float16, torch.bfloat16) and key_cache.dtype == value_cache.dtype == query.dtype
    demand(half, "sf.dtype", f"query {query.dtype}, caches {key_cache.dtype} and {value_cache.dtype}")
    demand(mask.dtype == query.dtype, "sf.mask-dtype", f"mask {mask.dtype}, query {query.dtype}: additive, and alike")
    are_int32 = all(tensor.dtype == torch.int32 for tensor in (block_table, context_lens, seq_len))
    demand(are_int32, "sf.int32", "block_table, context_lens and seq_len must be int32")
    fits = dim <= 256 and dim * size <= 128 * 128 and size % 16 == 0
    demand(fits, "sf.block", f"head_size {dim}, block_size {size}: at most 256, 128*128 together, 16-aligned")
    message = f"num_heads {num_heads} of {heads}, num_kv_heads {num_kv_heads} of {kv_heads}"
    demand(heads == num_heads and kv_heads == num_kv_heads and heads % kv_heads == 0, "sf.heads", message)
    lengths, contexts = seq_len.tolist(), context_lens.tolist()
    demand(sum(lengths) == tokens, "sf.tokens", f"seq_len {lengths} of {tokens} tokens")
    wide = mask.dim() == 2 and mask.shape[0] == tokens and mask.shape[1] >= max(contexts)
    demand(wide, "sf.mask-shape", f"mask {list(mask.shape)}: [num_tokens {tokens}, max_seq_len {max(contexts)}]")
    hidden = mask.float() <= HIDING
    demand_defined(
        bool((hidden | (mask == 0)).all()), "sf.mask-values", "the mask holds more than 0 and -inf or -10000"
    )
    cache = Cache(key_cache, value_cache, "sf.block-id")
    begin = 0
    for lane, (rows, length) in enumerate(zip(lengths, contexts, strict=True)):
        end = begin + rows
        key, value = (tensor.float() for tensor in cache.columns(block_table[lane], length))
        demand_defined(
            not bool(hidden[begin:end, :length].all(-1).any()), "sf.row-fully-masked", f"a row of request {lane}"
        )
        # Query heads of one KV head lie one after another, so the keys need no copy for each of them.
        grouped_query = query[begin:end].transpose(0, 1).float().reshape(kv_heads, -1, dim)
        scores = (grouped_query @ key.transpose(-1, -2)).view(heads, rows, length) * scale_value
        weights = torch.softmax(scores + mask[begin:end, :length].float(), -1).to(query.dtype).float()
        weighted_values = (weights.view(kv_heads, -1, length) @ value).view(heads, rows, dim)
        out[begin:end] = weighted_values.transpose(0, 1).to(query.dtype)
        begin = end
