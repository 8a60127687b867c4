"""npu_fused_infer_attention_score, emulated on the CPU by its documented contract.

Quantisation is left out; `latent` has the calls over latent rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backends.ascend.operators.fused_infer.call import Call
from backends.ascend.operators.fused_infer.latent import Rope, latent_attention
from backends.ascend.operators.fused_infer.ragged import ragged
from backends.ascend.operators.layouts import LAYOUTS, RANKS, from_bnsd, to_bnsd
from backends.ascend.operators.masked import WIDE_OPEN, attend, by_mode, check_compressed
from backends.ascend.operators.pages import Cache, cache_of, check_table
from backends.ascend.operators.rules import NotEmulated, defined, demand


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
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Attention, and its log-sum-exp: float32 [B, N, S, 1] or [T, N, 1], or [0] unless `softmax_lse_flag` asks for it.

    Raises:
        AscendContractError, AscendUndefinedBehaviour, NotEmulated: see `rules`.
    """
    _refuse_others(others)
    call = Call(
        query, key, value, atten_mask, actual_seq_lengths, actual_seq_lengths_kv, block_table, num_heads, scale,
        pre_tokens, next_tokens, input_layout, num_key_value_heads, sparse_mode, inner_precise, block_size,
        softmax_lse_flag,
    )  # fmt: skip
    _check(call)
    if call.input_layout == "TND":
        out, lse = ragged(call)
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
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Version 2, which renames five arguments, and which over latent rows takes sparse mode 9."""
    renamed: dict[str, Any] = {
        "actual_seq_lengths": actual_seq_qlen,
        "actual_seq_lengths_kv": actual_seq_kvlen,
        "num_heads": num_query_heads,
        "scale": softmax_scale,
        "softmax_lse_flag": return_softmax_lse,
    }
    said = "queryRope and keyRope should both be null or not null"
    demand((query_rope is None) == (key_rope is None), "fia.rope-pair", said)
    if query_rope is None or key_rope is None:
        return version_1(query, key, value, **renamed, **others)
    own = {name: others.pop(name, default) for name, default in _PLAIN.items()}
    _refuse_others(others)
    out, lse = latent_attention(Call(query, key, value, **renamed, **own), Rope(query_rope, key_rope))
    return out, lse if return_softmax_lse else torch.empty(0, dtype=torch.float32)


def _refuse_others(others: dict[str, Any]) -> None:
    """Refuse arguments that the emulation does not compute, unless they have their neutral value."""
    for name, given in others.items():
        if isinstance(given, Tensor) or given not in (None, 0, False):
            raise NotEmulated(f"{name} of npu_fused_infer_attention_score")


def _check(call: Call) -> None:
    """The checks of rules that hold in every layout."""
    query, mask = call.query, call.atten_mask
    demand(call.input_layout in LAYOUTS, "fia.layout", f"Layout {call.input_layout} is not supported!")
    layout = LAYOUTS[call.input_layout][0]
    rank = RANKS[layout]
    demand(query.dim() == rank, "fia.layout", f"Layout {layout}, queryDims({query.dim()}) must be {rank}!")
    half = (torch.float16, torch.bfloat16)
    demand(query.dtype in half, "fia.dtype", f"query dtype {query.dtype} is not float16 or bfloat16")
    same = call.key.dtype == call.value.dtype == query.dtype
    demand(same, "fia.kv-dtype", f"key {call.key.dtype} and value {call.value.dtype} with a query of {query.dtype}")
    for name, tensor in (("query", query), ("key", call.key), ("value", call.value), ("atten_mask", mask)):
        demand(tensor is None or tensor.is_contiguous(), "fia.contiguous", f"{name} is not contiguous")
    if mask is not None:
        flags = (torch.bool, torch.int8, torch.uint8)
        said = f"invalid maskType dtype[{mask.dtype}], maskType should be bool, int8 or uint8"
        demand(mask.dtype in flags, "fia.mask-dtype", said)
        known = mask.dtype == torch.bool or bool((mask == (mask != 0)).all())
        defined(known, "fia.mask-values", "the mask holds numbers other than 0 and 1")
    # `kv_heads` is num_heads where num_key_value_heads is 0, the operator's default.
    n, kv = call.num_heads, call.kv_heads
    demand(n > 0, "fia.heads", f"numHeads should be greater than 0, but got {n}")
    said = f"num_heads({n}) must be a multiple, at most 64-fold, of num_key_value_heads({kv})"
    demand(n % kv == 0 and n // kv <= 64, "fia.gqa", said)
    said = f"sparse_mode {call.sparse_mode} is not 0, 1, 2, 3 or 4"
    demand(call.sparse_mode in range(5), "fia.sparse-mode", said)
    if call.block_table is None:
        said = f"without Page Attention value'dim{call.value.dim()} should equal query's dim{query.dim()}!"
        demand(call.value.dim() == query.dim() and call.key.shape == call.value.shape, "fia.rank", said)


def check_head_dim(dim: int) -> None:
    """The rules for the head dimension."""
    demand(dim % 16 == 0, "fia.head-dim-16", "D should be 16 elements aligned when with FP16/BF16 dtype!")
    demand(dim <= 512, "fia.head-dim-512", f"headDim:{dim} cannot be greater than 512.")


def _dense(call: Call) -> tuple[Tensor, Tensor]:
    """Attention in a layout with a batch axis.

    The device sends one query row to the incremental kernel, and several rows to the prompt kernel.
    """
    layout, returned = LAYOUTS[call.input_layout]
    if layout == "BSH":
        said = f"H({call.query.shape[-1]}) is no multiple of num_heads({call.num_heads})"
        demand(call.query.shape[-1] % call.num_heads == 0, "fia.heads", said)
    query = to_bnsd(call.query, layout, call.num_heads)
    batch, heads, rows, dim = query.shape
    demand(heads == call.num_heads, "fia.heads", f"num_heads({call.num_heads}) != N({heads}) of the query")
    check_head_dim(dim)
    # Rule fia.inner-precise: one query row takes 0 and 1 only.
    most = 1 if rows == 1 else 3
    said = f"inner_precise {call.inner_precise} is not 0 to {most} with Q_S = {rows}"
    demand(0 <= call.inner_precise <= most, "fia.inner-precise", said)
    cache, room = _columns(call, layout, batch, rows, dim)
    own = [rows] * batch
    if rows > 1:
        own = _lengths(call.actual_seq_lengths, rows, batch, "actual_seq_lengths")
    held = _lengths(call.actual_seq_lengths_kv, room, batch, "actual_seq_lengths_kv")
    mask = _mask(call, batch, rows, room, held)
    # What lies past a request's own rows is not written on the device: NaN stands for what was there before.
    out = torch.full((batch, heads, rows, call.value.shape[-1] if cache is None else dim), float("nan"))
    out = out.to(query.dtype)
    lse = torch.full((batch, heads, rows, 1), float("nan"))
    for at in range(batch):
        mine, length = own[at], held[at]
        # A request without keys gets the output 0 and the log-sum-exp infinity.
        if not length:
            out[at, :, :mine], lse[at, :, :mine] = 0.0, float("inf")
            continue
        if cache is None:
            key, value = (to_bnsd(one, layout, call.kv_heads)[at, :, :length] for one in (call.key, call.value))
        else:
            assert call.block_table is not None
            key, value = cache.columns(call.block_table[at], length)
        hidden = None
        if rows > 1:
            hidden = by_mode(
                call.sparse_mode, mine, length, call.pre_tokens, call.next_tokens, call.atten_mask is not None
            )
        if mask is not None:
            given = mask[at if len(mask) > 1 else 0, :mine, :length]
            hidden = given if hidden is None else given | hidden
        # In mode 3, rows before the first key see nothing; bit 1 makes `attend` write zeros for them.
        invalid = 2 if call.sparse_mode == 3 and mine > length and rows > 1 else 0
        mixed = attend(query[at, :, :mine], key, value, hidden, call.scale, call.inner_precise | invalid, "fia")
        out[at, :, :mine], lse[at, :, :mine, 0] = mixed
    return from_bnsd(out, returned), lse


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
        said = f"H({call.key.shape[-1]}) of the key is not num_key_value_heads({call.kv_heads}) * D({dim})"
        demand(call.key.shape[-1] == call.kv_heads * dim, "fia.gqa", said)
    key = to_bnsd(call.key, layout, call.kv_heads)
    said = f"key N axis({key.shape[1]}) != num_key_value_heads({call.kv_heads})"
    demand(key.shape[1] == call.kv_heads, "fia.gqa", said)
    demand(key.shape[0] == batch and key.shape[3] == dim, "fia.rank", "batch or D of the key is not the query's")
    return None, key.shape[2]


def _lengths(given: Sequence[int] | None, room: int, batch: int, name: str) -> list[int]:
    """A length for each request from `given`; `room` for all where none is given."""
    if given is None:
        return [room] * batch
    count = len(given)
    said = f"{name} shape size is {count}, it should be bigger or equal to batch size({batch}) or equal to 1"
    demand(count == 1 or count >= batch, "fia.lengths-count", said)
    lengths = [int(one) for one in given] * (batch if count == 1 else 1)
    demand(all(0 <= one <= room for one in lengths[:batch]), "fia.lengths-range", f"{name} {lengths} not in 0..{room}")
    return lengths[:batch]


def _mask(call: Call, batch: int, rows: int, room: int, held: list[int]) -> Tensor | None:
    """The mask as bool [1 or B, at least rows, at least room], True = masked; None where only the sparse mode masks."""
    mask = call.atten_mask
    if rows == 1:
        return (
            None if mask is None else _mask_of_one_row(mask, batch, room if call.block_table is not None else max(held))
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
        defined(
            mask.shape[1] == 1, "fia.mask-heads", f"the mask has {mask.shape[1]} heads, of which none is looked for"
        )
    # The kernel steps from request to request by one Q_S x KV_S mask, whatever a head axis says.
    return mask.reshape(-1, high, wide)[:lanes].bool()


def _mask_of_one_row(mask: Tensor, batch: int, needed: int) -> Tensor:
    """The mask of the incremental kernel as bool [B, 1, columns]."""
    said = f"batchSize[{mask.shape[0]}] of atten_mask must be equal to batchSize[{batch}] of query."
    demand(mask.shape[0] == batch and mask.numel() == batch * mask.shape[-1], "fia.one-row-mask-batch", said)
    wide = mask.shape[-1]
    said = f"s Size[{wide}] of atten_mask must be greater than or equal to sMax[{needed}]."
    demand(wide >= needed, "fia.one-row-mask-length", said)
    flat = mask.reshape(batch, 1, wide).bool()
    if mask.dim() == 4 and wide > 512:
        defined(False, "fia.one-row-mask-512", f"a rank-4 mask of {wide} columns with Q_S = 1 is ignored past 512")
        # The kernel's behaviour, for a probe: columns from 512 on are visible whatever the mask says.
        flat = flat.clone()
        flat[..., 512:] = False
    return flat
