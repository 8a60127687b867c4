"""Axis orders of Ascend's attention tensors, and conversion to and from BNSD."""

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
