"""Rotary embedding and RMS norm of Ascend, emulated on the CPU.

Table shapes, rotation modes and the number of results are as the documents of the operators say.
"""

import torch
from torch import Tensor

from specverify.backends.ascend.operators.rules import NotEmulated, demand


def _quarter_turn(tensor: Tensor, mode: str) -> Tensor:
    """`tensor` turned by a quarter: (-second, first) of its halves, or of each pair in mode interleave."""
    if mode == "half":
        first, second = tensor.chunk(2, -1)
        return torch.cat([-second, first], -1)
    return torch.stack([-tensor[..., 1::2], tensor[..., ::2]], -1).flatten(-2)


def _rotate(tensor: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """`tensor` rotated by the tables, computed in float32."""
    wide = tensor.float()
    return (wide * cos.float() + _quarter_turn(wide, mode) * sin.float()).to(tensor.dtype)


def rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """`input * r1 + turned(input) * r2`, where r1 is the cosine and r2 the sine."""
    if rotate is not None:
        raise NotEmulated("a rotate matrix in npu_rotary_mul")
    demand(rotary_mode in ("half", "interleave"), "rot.mode", f"rotary_mode {rotary_mode!r}")
    shape = input.shape
    message = f"input {list(shape)}, r1 {list(r1.shape)}, r2 {list(r2.shape)}"
    four = input.dim() == r1.dim() == 4 and r1.shape == r2.shape
    demand(four, "rot.shape", message)
    demand(shape[3] % 2 == 0 and shape[3] < 896, "rot.head-dim", f"D({shape[3]}) must be even and below 896")
    outer = all(table in (1, size) for table, size in zip(r1.shape[:3], shape[:3], strict=True))
    # Positions are axis 1 of BSND and axis 2 of BNSD; tables never broadcast over them.
    rows = r1.shape[1] == shape[1] or r1.shape[2] == shape[2]
    demand(outer and rows and r1.shape[3] == shape[3], "rot.shape", message)
    return _rotate(input, r1, r2, rotary_mode)


def apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Rotate query and key in place, as the operator's page documents; the schema declares no alias."""
    is_supported = {"BSND": 4, "TND": 3}.get(layout) == query.dim() and rotary_mode == "half"
    demand(is_supported, "arp.layout", f"layout {layout!r} with {query.dim()} axes, rotary_mode {rotary_mode!r}")
    demand(query.shape[-1] in (64, 128), "arp.head-dim", f"D({query.shape[-1]}) must be 64 or 128")
    demand(query.dtype == key.dtype == cos.dtype == sin.dtype, "arp.dtype", "query, key, cos and sin differ in dtype")
    expected = (*query.shape[:-2], 1, query.shape[-1])
    alike = tuple(cos.shape) == tuple(sin.shape) == expected and key.shape[:-2] == query.shape[:-2]
    message = f"query {list(query.shape)}, key {list(key.shape)}, cos {list(cos.shape)}, expected {list(expected)}"
    demand(alike and key.shape[-1] == query.shape[-1], "arp.shape", message)
    for tensor in (query, key):
        tensor.copy_(_rotate(tensor, cos, sin, rotary_mode))
    return query, key


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The normalised input in its own dtype, and 1 / rms as float32 with size 1 in the normalised axes."""
    alike = gamma.shape == input.shape[input.dim() - gamma.dim() :] and gamma.dtype in (input.dtype, torch.float32)
    message = f"gamma {gamma.dtype} {list(gamma.shape)} for an input {input.dtype} {list(input.shape)}"
    demand(alike, "rms.gamma", message)
    return _normalize(input, gamma, epsilon)


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised sum, 1 / rms of the sum, and the sum."""
    alike = x1.shape == x2.shape and x1.dtype == x2.dtype and gamma.shape == x1.shape[x1.dim() - gamma.dim() :]
    demand(alike, "add-rms.inputs", f"x1 {x1.dtype} {list(x1.shape)}, x2 {x2.dtype} {list(x2.shape)}")
    # The norm reads the sum after its rounding to the dtype of the inputs.
    total = (x1.float() + x2.float()).to(x1.dtype)
    return *_normalize(total, gamma, epsilon), total


def _normalize(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """`input` normalised over the axes of `gamma`, and 1 / rms."""
    axes = tuple(range(input.dim() - gamma.dim(), input.dim()))
    wide = input.float()
    scale = torch.rsqrt(wide.square().mean(axes, keepdim=True) + epsilon)
    return (wide * scale * gamma.float()).to(input.dtype), scale
