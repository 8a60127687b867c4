"""npu_fusion_attention, emulated on the CPU.

The SDPA of torch_npu calls this operator. Unlike fused-infer attention it takes float32, and a mask for each head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specverify.backends.ascend.operators.masked import WIDE_OPEN, attend, check_compressed, mode_mask
from specverify.backends.ascend.operators.rules import NotEmulated, demand
from specverify.backends.ascend.operators.shapes import RANKS, from_bnsd, to_bnsd

Seven = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]
"""The seven results of the operator."""


def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = WIDE_OPEN,
    next_tockens: int = WIDE_OPEN,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    **other_arguments: Any,
) -> Seven:
    """Attention, the maximum and the sum of the softmax as float32 [B, N, S, 8], an empty tensor, and three zeros.

    Raises:
        AscendContractError, AscendUndefinedBehaviour, NotEmulated: see `rules`.
    """
    if any(argument is not None for argument in (pse, padding_mask, prefix, sink)) or keep_prob != 1.0:
        raise NotEmulated("pse, padding mask, prefix, sink or dropout of npu_fusion_attention")
    if input_layout == "TND" or actual_seq_qlen is not None or actual_seq_kvlen is not None:
        raise NotEmulated("ragged npu_fusion_attention")
    message = f"The input_layout should be BSH/SBH/BNSD/BSND/TND, got {input_layout} with a query of rank {query.dim()}"
    demand(query.dim() == RANKS.get(input_layout), "fa.layout", message)
    wide = (torch.float16, torch.bfloat16, torch.float32)
    message = f"query {query.dtype}, key {key.dtype}, value {value.dtype}"
    demand(query.dtype in wide and key.dtype == value.dtype == query.dtype, "fa.dtype", message)
    demand(0 <= sparse_mode <= 6, "fa.sparse-mode", f"sparse_mode must be in range of [0,6], but got {sparse_mode}")
    if sparse_mode > 4:
        raise NotEmulated(f"sparse_mode {sparse_mode} of npu_fusion_attention")
    q, k, v = _heads_apart(query, key, value, head_num, input_layout)
    batch, heads, rows, _ = q.shape
    columns = k.shape[2]
    mask = _mask(atten_mask, sparse_mode, (batch, heads, rows, columns))
    hidden = None
    if atten_mask is not None:  # without a mask the operator ignores modes and bands
        hidden = mode_mask(sparse_mode, rows, columns, pre_tockens, next_tockens, True)
    out = torch.empty(batch, heads, rows, v.shape[-1], dtype=query.dtype)
    most = torch.zeros(batch, heads, rows, 8)
    total = torch.empty(batch, heads, rows, 8)
    for lane in range(batch):
        lane_mask = None if mask is None else mask[lane if len(mask) > 1 else 0]
        if lane_mask is not None and lane_mask.shape[0] == 1:
            lane_mask = lane_mask[0]
        masked = hidden
        if lane_mask is not None:
            masked = lane_mask if hidden is None else lane_mask | hidden
        # A maximum of 0 and a sum of exp(lse) express the same log-sum-exp as the kernel's own pair.
        lane_out, lane_lse = attend(q[lane], k[lane], v[lane], masked, scale, inner_precise, "fa")
        out[lane] = lane_out
        total[lane] = lane_lse.exp()[..., None]
    return from_bnsd(out, input_layout), most, total, torch.empty(0, dtype=query.dtype), 0, 0, 0


def _heads_apart(query: Tensor, key: Tensor, value: Tensor, heads: int, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as [B, N, S, D]; the number of KV heads follows from the key."""
    flat = layout in ("BSH", "SBH")
    message = f"head_num({heads}) does not divide H({query.shape[-1]})"
    demand(heads > 0 and (not flat or query.shape[-1] % heads == 0), "fa.heads", message)
    dim = query.shape[-1] // heads if flat else query.shape[-1]
    demand(0 < dim <= 768 and (flat or key.shape[-1] == dim), "fa.head-dim", f"D({dim}) and key D({key.shape[-1]})")
    kv_heads = key.shape[-1] // dim if flat else key.shape[1 if layout == "BNSD" else 2]
    q, k, v = to_bnsd(query, layout, heads), to_bnsd(key, layout, kv_heads), to_bnsd(value, layout, kv_heads)
    message = f"head_num({heads}), N({q.shape[1]}) of the query and Nkv({kv_heads})"
    demand(q.shape[1] == heads and kv_heads > 0 and heads % kv_heads == 0, "fa.heads", message)
    return q, k, v


def _mask(mask: Tensor | None, sparse_mode: int, shape: tuple[int, int, int, int]) -> Tensor | None:
    """The mask as bool [1 or B, 1 or N, Sq, Skv]; None where only the sparse mode masks."""
    batch, heads, rows, columns = shape
    if mask is None:
        demand(sparse_mode == 0, "fa.mask-required", f"attenMask should not be null when sparse_mode is {sparse_mode}.")
        return None
    flags = (torch.bool, torch.uint8)
    demand(mask.dtype in flags, "fa.mask-dtype", f"invalid attenMask dtype[{mask.dtype}], only support bool or uint8.")
    if sparse_mode in (2, 3, 4):
        check_compressed(mask, sparse_mode, "fa")
        return None
    # Unlike fused-infer attention, a mask wider than the scores is refused.
    exact = {
        (rows, columns),
        *((lanes, mask_heads, rows, columns) for lanes, mask_heads in ((1, 1), (batch, 1), (batch, heads))),
    }
    demand(
        tuple(mask.shape) in exact,
        "fa.mask-shape",
        f"get unsupported atten_mask shape, the shape is {list(mask.shape)}. B=[{batch}], N=[{heads}], Sq=[{rows}], "
        f"Skv=[{columns}], supported atten_mask shape can be [B, N, Sq, Skv], [B, 1, Sq, Skv], [1, 1, Sq, Skv] and "
        "[Sq, Skv].",
    )
    return mask.bool().view((1, 1, rows, columns) if mask.dim() == 2 else mask.shape)
