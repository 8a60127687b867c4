"""Axis orders of Ascend's attention tensors, and Meta kernels: shapes of results without data."""

from typing import Any

import torch
from torch import Tensor

LAYOUTS = {
    "BSH": ("BSH", "BSH"),
    "BSND": ("BSND", "BSND"),
    "BNSD": ("BNSD", "BNSD"),
    "TND": ("TND", "TND"),
    "BNSD_BSND": ("BNSD", "BSND"),
    "BSH_BNSD": ("BSH", "BNSD"),
    "BSND_BNSD": ("BSND", "BNSD"),
    "BSH_NBSD": ("BSH", "NBSD"),
    "BSND_NBSD": ("BSND", "NBSD"),
    "BNSD_NBSD": ("BNSD", "NBSD"),
}
"""input_layout to the layouts of query and output, as in the wheel's Meta kernels; NTD and NSD are left out."""

RANKS = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "TND": 3}
"""The number of axes of a tensor in each layout."""


def to_bnsd(tensor: Tensor, layout: str, heads: int) -> Tensor:
    """A view [B, N, S, D] of `tensor` in `layout`; `heads` splits H where the heads have no axis of their own."""
    if layout == "SBH":
        tensor, layout = tensor.transpose(0, 1), "BSH"
    if layout == "BSH":
        tensor, layout = tensor.reshape(*tensor.shape[:-1], heads, tensor.shape[-1] // heads), "BSND"
    return tensor.transpose(1, 2) if layout == "BSND" else tensor


def from_bnsd(tensor: Tensor, layout: str) -> Tensor:
    """A contiguous tensor in `layout` from one of [B, N, S, D]."""
    if layout == "NBSD":
        return tensor.transpose(0, 1).contiguous()
    if layout == "BNSD":
        return tensor.contiguous()
    rows = tensor.transpose(1, 2)
    if layout == "BSND":
        return rows.contiguous()
    flat = rows.flatten(2)
    return (flat.transpose(0, 1) if layout == "SBH" else flat).contiguous()


def infer_attention(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of npu_fused_infer_attention_score, by the argument names of either version."""
    heads = int(arguments.get("num_heads", arguments.get("num_query_heads", 1)))
    layout, output_layout = LAYOUTS[arguments.get("input_layout", "BSH")]
    wants_lse = arguments.get("softmax_lse_flag", arguments.get("return_softmax_lse", False))
    if layout == "TND":
        out = torch.empty_like(query)
        shape = [*query.shape[:2], 1]
    else:
        rows = to_bnsd(query, layout, heads)
        out = from_bnsd(torch.empty_like(rows), output_layout)
        shape = [*rows.shape[:3], 1]
    return out, query.new_empty(shape if wants_lse else [0], dtype=torch.float32)


def fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """The seven results of npu_fusion_attention."""
    rows = to_bnsd(query, input_layout, head_num)
    pair = [query.new_empty([*rows.shape[:3], 8], dtype=torch.float32) for _ in range(2)]
    return torch.empty_like(query).contiguous(), *pair, query.new_empty([0]), 0, 0, 0  # type: ignore[return-value]


def first(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """The first argument, for an operator that works in place."""
    return tensor


def like_first(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """A tensor like the first argument."""
    return torch.empty_like(tensor)


def no_output(*_: Any, **__: Any) -> None:
    """No result, for operators that return nothing."""


def rotary_like(query: Tensor, key: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Tensors like query and key."""
    return torch.empty_like(query), torch.empty_like(key)


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """A tensor like the input, and float32 with size 1 in the normalised axes."""
    num_kept_axes = input.dim() - gamma.dim()
    shape = [*input.shape[:num_kept_axes], *[1] * gamma.dim()]
    return torch.empty_like(input), input.new_empty(shape, dtype=torch.float32)


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `rms_norm`, and a tensor like the sum."""
    return *rms_norm(x1, gamma), torch.empty_like(x1)
