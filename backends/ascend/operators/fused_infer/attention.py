"""npu_fused_infer_attention_score, emulated on the CPU by its documented contract.

Quantisation is left out; `latent` has the calls over latent rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specverify.backends.ascend.operators.fused_infer.call import Call
from specverify.backends.ascend.operators.fused_infer.latent import Rope, latent_attention
from specverify.backends.ascend.operators.fused_infer.ragged import ragged_attention
from specverify.backends.ascend.operators.masked import WIDE_OPEN, attend, check_compressed, mode_mask
from specverify.backends.ascend.operators.pages import Cache, cache_of, check_table
from specverify.backends.ascend.operators.rules import NotEmulated, demand, demand_defined
from specverify.backends.ascend.operators.shapes import LAYOUTS, RANKS, from_bnsd, to_bnsd


def version_1(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = WIDE_OPEN,
    next_tokens: int = WIDE_OPEN,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    **other_arguments: Any,
) -> tuple[Tensor, Tensor]:
    """Attention, and its log-sum-exp: float32 [B, N, S, 1] or [T, N, 1], or [0] unless `softmax_lse_flag` asks for it.

    Raises:
        AscendContractError, AscendUndefinedBehaviour, NotEmulated: see `rules`.
    """
    _refuse_other_arguments(other_arguments)
    call = Call(
        query, key, value, atten_mask, actual_seq_lengths, actual_seq_lengths_kv, block_table, num_heads, scale,
        pre_tokens, next_tokens, input_layout, num_key_value_heads, sparse_mode, inner_precise, block_size,
        softmax_lse_flag,
    )  # fmt: skip
    _check(call)
    if call.input_layout == "TND":
        out, lse = ragged_attention(call)
    else:
        out, lse = _dense(call)
    return out, lse if softmax_lse_flag else torch.empty(0, dtype=torch.float32)


_PLAIN: dict[str, Any] = {
    "atten_mask": None,
    "block_table": None,
    "pre_tokens": WIDE_OPEN,
    "next_tokens": WIDE_OPEN,
    "input_layout": "BSH",
    "num_key_value_heads": 0,
    "sparse_mode": 0,
    "inner_precise": 0,
    "block_size": 0,
}
"""The defaults of arguments that both versions call alike."""


def version_2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    num_query_heads: int = 1,
    softmax_scale: float = 1.0,
    return_softmax_lse: bool = False,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    **other_arguments: Any,
) -> tuple[Tensor, Tensor]:
    """Version 2, which renames five arguments, and which over latent rows takes sparse mode 9."""
    version_1_arguments: dict[str, Any] = {
        "actual_seq_lengths": actual_seq_qlen,
        "actual_seq_lengths_kv": actual_seq_kvlen,
        "num_heads": num_query_heads,
        "scale": softmax_scale,
        "softmax_lse_flag": return_softmax_lse,
    }
    message = "queryRope and keyRope should both be null or not null"
    demand((query_rope is None) == (key_rope is None), "fia.rope-pair", message)
    if query_rope is None or key_rope is None:
        return version_1(query, key, value, **version_1_arguments, **other_arguments)
    plain_arguments = {name: other_arguments.pop(name, default) for name, default in _PLAIN.items()}
    _refuse_other_arguments(other_arguments)
    out, lse = latent_attention(
        Call(query, key, value, **version_1_arguments, **plain_arguments), Rope(query_rope, key_rope)
    )
    return out, lse if return_softmax_lse else torch.empty(0, dtype=torch.float32)


def _refuse_other_arguments(other_arguments: dict[str, Any]) -> None:
    """Refuse arguments that the emulation does not compute, unless they have their neutral value."""
    for name, value in other_arguments.items():
        if isinstance(value, Tensor) or value not in (None, 0, False):
            raise NotEmulated(f"{name} of npu_fused_infer_attention_score")


def _check(call: Call) -> None:
    """The checks of rules that hold in every layout."""
    query = call.query
    mask = call.atten_mask
    demand(call.input_layout in LAYOUTS, "fia.layout", f"Layout {call.input_layout} is not supported!")
    layout = LAYOUTS[call.input_layout][0]
    rank = RANKS[layout]
    demand(query.dim() == rank, "fia.layout", f"Layout {layout}, queryDims({query.dim()}) must be {rank}!")
    half = (torch.float16, torch.bfloat16)
    demand(query.dtype in half, "fia.dtype", f"query dtype {query.dtype} is not float16 or bfloat16")
    same_dtype = call.key.dtype == call.value.dtype == query.dtype
    demand(
        same_dtype, "fia.kv-dtype", f"key {call.key.dtype} and value {call.value.dtype} with a query of {query.dtype}"
    )
    for name, tensor in (("query", query), ("key", call.key), ("value", call.value), ("atten_mask", mask)):
        demand(tensor is None or tensor.is_contiguous(), "fia.contiguous", f"{name} is not contiguous")
    if mask is not None:
        flags = (torch.bool, torch.int8, torch.uint8)
        message = f"invalid maskType dtype[{mask.dtype}], maskType should be bool, int8 or uint8"
        demand(mask.dtype in flags, "fia.mask-dtype", message)
        is_binary = mask.dtype == torch.bool or bool((mask == (mask != 0)).all())
        demand_defined(is_binary, "fia.mask-values", "the mask holds numbers other than 0 and 1")
    # `kv_heads` is num_heads where num_key_value_heads is 0, the operator's default.
    n, kv = call.num_heads, call.kv_heads
    demand(n > 0, "fia.heads", f"numHeads should be greater than 0, but got {n}")
    message = f"num_heads({n}) must be a multiple, at most 64-fold, of num_key_value_heads({kv})"
    demand(n % kv == 0 and n // kv <= 64, "fia.gqa", message)
    message = f"sparse_mode {call.sparse_mode} is not 0, 1, 2, 3 or 4"
    demand(call.sparse_mode in range(5), "fia.sparse-mode", message)
    if call.block_table is None:
        message = f"without Page Attention value'dim{call.value.dim()} should equal query's dim{query.dim()}!"
        demand(call.value.dim() == query.dim() and call.key.shape == call.value.shape, "fia.rank", message)


def check_head_dim(dim: int) -> None:
    """The rules for the head dimension."""
    demand(dim % 16 == 0, "fia.head-dim-16", "D should be 16 elements aligned when with FP16/BF16 dtype!")
    demand(dim <= 512, "fia.head-dim-512", f"headDim:{dim} cannot be greater than 512.")


def _dense(call: Call) -> tuple[Tensor, Tensor]:
    """Attention in a layout with a batch axis.

    The device sends one query row to the incremental kernel, and several rows to the prompt kernel.
    """
    layout, output_layout = LAYOUTS[call.input_layout]
    if layout == "BSH":
        message = f"H({call.query.shape[-1]}) is no multiple of num_heads({call.num_heads})"
        demand(call.query.shape[-1] % call.num_heads == 0, "fia.heads", message)
    query = to_bnsd(call.query, layout, call.num_heads)
    batch, heads, rows, dim = query.shape
    demand(heads == call.num_heads, "fia.heads", f"num_heads({call.num_heads}) != N({heads}) of the query")
    check_head_dim(dim)
    # Rule fia.inner-precise: one query row takes 0 and 1 only.
    most = 1 if rows == 1 else 3
    message = f"inner_precise {call.inner_precise} is not 0 to {most} with Q_S = {rows}"
    demand(0 <= call.inner_precise <= most, "fia.inner-precise", message)
    cache, room = _columns(call, layout, batch, rows, dim)
    query_lengths = [rows] * batch
    if rows > 1:
        query_lengths = _lengths(call.actual_seq_lengths, rows, batch, "actual_seq_lengths")
    key_lengths = _lengths(call.actual_seq_lengths_kv, room, batch, "actual_seq_lengths_kv")
    mask = _mask(call, batch, rows, room, key_lengths)
    # What lies past a request's own rows is not written on the device: NaN stands for what was there before.
    out = torch.full((batch, heads, rows, call.value.shape[-1] if cache is None else dim), float("nan"))
    out = out.to(query.dtype)
    lse = torch.full((batch, heads, rows, 1), float("nan"))
    for lane in range(batch):
        num_rows = query_lengths[lane]
        length = key_lengths[lane]
        # A request without keys gets the output 0 and the log-sum-exp infinity.
        if not length:
            out[lane, :, :num_rows] = 0.0
            lse[lane, :, :num_rows] = float("inf")
            continue
        if cache is None:
            key, value = (to_bnsd(tensor, layout, call.kv_heads)[lane, :, :length] for tensor in (call.key, call.value))
        else:
            assert call.block_table is not None
            key, value = cache.columns(call.block_table[lane], length)
        hidden = None
        if rows > 1:
            hidden = mode_mask(
                call.sparse_mode, num_rows, length, call.pre_tokens, call.next_tokens, call.atten_mask is not None
            )
        if mask is not None:
            lane_mask = mask[lane if len(mask) > 1 else 0, :num_rows, :length]
            hidden = lane_mask if hidden is None else lane_mask | hidden
        # In mode 3, rows before the first key see nothing; bit 1 makes `attend` write zeros for them.
        invalid = 2 if call.sparse_mode == 3 and num_rows > length and rows > 1 else 0
        precise = call.inner_precise | invalid
        lane_out, lane_lse = attend(query[lane, :, :num_rows], key, value, hidden, call.scale, precise, "fia")
        out[lane, :, :num_rows] = lane_out
        lse[lane, :, :num_rows, 0] = lane_lse
    return from_bnsd(out, output_layout), lse


def _columns(call: Call, layout: str, batch: int, rows: int, dim: int) -> tuple[Cache | None, int]:
    """The paged cache, or None, and the largest number of columns that a request may have."""
    if call.block_table is not None:
        demand(
            call.actual_seq_lengths_kv is not None,
            "fia.table-lengths",
            "actual seq length kv can't be null when blockTable is not null",
        )
        check_table(call.block_table, batch, call.block_size, rows)
        cache = cache_of(call.key, call.value, call.kv_heads, dim, call.block_size, layout)
        room = call.block_table.shape[1] * call.block_size
        return cache, room
    if layout == "BSH":
        message = f"H({call.key.shape[-1]}) of the key is not num_key_value_heads({call.kv_heads}) * D({dim})"
        demand(call.key.shape[-1] == call.kv_heads * dim, "fia.gqa", message)
    key = to_bnsd(call.key, layout, call.kv_heads)
    message = f"key N axis({key.shape[1]}) != num_key_value_heads({call.kv_heads})"
    demand(key.shape[1] == call.kv_heads, "fia.gqa", message)
    demand(key.shape[0] == batch and key.shape[3] == dim, "fia.rank", "batch or D of the key is not the query's")
    return None, key.shape[2]


def _lengths(entries: Sequence[int] | None, room: int, batch: int, name: str) -> list[int]:
    """A length for each request from `entries`; `room` for all where none is given."""
    if entries is None:
        return [room] * batch
    count = len(entries)
    message = f"{name} shape size is {count}, it should be bigger or equal to batch size({batch}) or equal to 1"
    demand(count == 1 or count >= batch, "fia.lengths-count", message)
    lengths = [int(entry) for entry in entries] * (batch if count == 1 else 1)
    demand(
        all(0 <= length <= room for length in lengths[:batch]),
        "fia.lengths-range",
        f"{name} {lengths} not in 0..{room}",
    )
    return lengths[:batch]


def _mask(call: Call, batch: int, rows: int, room: int, key_lengths: list[int]) -> Tensor | None:
    """The mask as bool [1 or B, at least rows, at least room], True = masked; None where only the sparse mode masks."""
    mask = call.atten_mask
    if rows == 1:
        return (
            None
            if mask is None
            else _mask_of_one_row(mask, batch, room if call.block_table is not None else max(key_lengths))
        )
    if call.sparse_mode in (2, 3, 4):
        check_compressed(mask, call.sparse_mode, "fia")
        return None
    demand(call.sparse_mode == 0 or mask is not None, "fia.mask-required", "attenMask should not be null")
    if mask is None:
        return None
    demand(mask.dim() in (2, 3, 4), "fia.mask-dim", f"attenMask dim({mask.dim()}) must be 2 or 3 or 4!")
    lanes = 1 if mask.dim() == 2 else mask.shape[0]
    high, wide = mask.shape[-2:]
    demand(
        lanes in (1, batch) and high >= rows and wide >= room,
        "fia.mask-shape",
        f"attenMask batch({lanes}) must be 1 or {batch}, attenMask Q_S({high}) must be larger than sQ({rows}), "
        f"attenMask KV_S({wide}) must be larger than sK({room}), please check",
    )
    if mask.dim() == 4:
        demand_defined(
            mask.shape[1] == 1, "fia.mask-heads", f"the mask has {mask.shape[1]} heads, of which none is looked for"
        )
    # The kernel steps from request to request by one Q_S x KV_S mask, whatever a head axis says.
    return mask.reshape(-1, high, wide)[:lanes].bool()


def _mask_of_one_row(mask: Tensor, batch: int, num_columns: int) -> Tensor:
    """The mask of the incremental kernel as bool [B, 1, columns]."""
    message = f"batchSize[{mask.shape[0]}] of atten_mask must be equal to batchSize[{batch}] of query."
    demand(mask.shape[0] == batch and mask.numel() == batch * mask.shape[-1], "fia.one-row-mask-batch", message)
    wide = mask.shape[-1]
    message = f"s Size[{wide}] of atten_mask must be greater than or equal to sMax[{num_columns}]."
    demand(wide >= num_columns, "fia.one-row-mask-length", message)
    flat = mask.reshape(batch, 1, wide).bool()
    if mask.dim() == 4 and wide > 512:
        demand_defined(
            False, "fia.one-row-mask-512", f"a rank-4 mask of {wide} columns with Q_S = 1 is ignored past 512"
        )
        # The kernel's behaviour, for a probe: columns from 512 on are visible whatever the mask says.
        flat = flat.clone()
        flat[..., 512:] = False
    return flat
